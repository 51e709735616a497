"""The order of samples in each epoch, and the saved position in it.

The order is a permutation that can be evaluated at any index and takes next to no memory. It uses integer arithmetic
modulo 2**64 only, so it is the same on every platform and under every version of Python, NumPy and torch. (NumPy
guarantees that for the bits of its generators, not for `permutation`; torch guarantees nothing for `randperm`.) The
arithmetic must never change: `VERSION` stands for it in saved positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 8
_MAX_TABLE = 1 << 16
"""Up to this length a table is faster, and a Feistel network over so few numbers would favour some orders."""

KIND = "surefoot.data.position"
VERSION = 1
"""Of the fields and of the order itself: a state of another version would continue with other samples."""
_MAX_INT = 1 << 63


def hash_key(*parts: int) -> int:
    """A 64-bit hash of the parts and their order (SplitMix64)."""
    h = 0
    for part in parts:
        h = ((h ^ (part & _MASK64)) + _GOLDEN) & _MASK64
        h = ((h ^ (h >> 30)) * _MIX1) & _MASK64
        h = ((h ^ (h >> 27)) * _MIX2) & _MASK64
        h ^= h >> 31
    return h


def _mix(x: _Words) -> _Words:
    """The finalizer of SplitMix64, for a whole array."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
    return x ^ (x >> np.uint64(31))


class EpochOrder:
    """Maps places in an epoch to samples and back; a function of length, seed and epoch alone."""

    def __init__(self, length: int, *, seed: int, epoch: int, shuffle: bool) -> None:
        small = _Sequential() if not shuffle else _Table(length, seed, epoch) if length <= _MAX_TABLE else None
        self._permutation = small or _FeistelNetwork(length, seed, epoch)

    def samples(self, places: Indices) -> Indices:
        """The samples at these places."""
        return self._permutation.samples(places)

    def places(self, samples: Indices) -> Indices:
        """The places of these samples."""
        return self._permutation.places(samples)


class _Sequential:
    """No shuffling."""

    def samples(self, places: Indices) -> Indices:
        return places

    def places(self, samples: Indices) -> Indices:
        return samples


class _Table:
    """Samples sorted by a random number each; all numbers differ, so the order is unique."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        gamma = np.arange(length, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._samples = np.argsort(_mix(gamma + np.uint64(hash_key(seed, epoch))))
        self._places = np.empty_like(self._samples)
        self._places[self._samples] = np.arange(length)

    def samples(self, places: Indices) -> Indices:
        return self._samples[places]

    def places(self, samples: Indices) -> Indices:
        return self._places[samples]


class _FeistelNetwork:
    """A permutation of slightly more numbers than samples, evaluated only at the requested places."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self._length = length
        # Always more numbers than samples: on exactly as many, a network gives even permutations only.
        half = (length.bit_length() + 1) // 2
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._keys = [np.uint64(hash_key(seed, epoch, i)) for i in range(_ROUNDS)]

    def samples(self, places: Indices) -> Indices:
        return self._walk(places, backward=False)

    def places(self, samples: Indices) -> Indices:
        return self._walk(samples, backward=True)

    def _walk(self, numbers: Indices, *, backward: bool) -> Indices:
        """Apply the network again to every number beyond the length, until it falls within (cycle walking)."""
        step = self._backward if backward else self._forward
        out = step(numbers.astype(np.uint64))
        beyond = np.flatnonzero(out >= self._length)
        while beyond.size:
            out[beyond] = step(out[beyond])
            beyond = beyond[out[beyond] >= self._length]
        return out.astype(np.int64)

    def _forward(self, x: _Words) -> _Words:
        left, right = x >> self._half, x & self._mask
        for k in self._keys:
            left, right = right, left ^ (_mix(right + k) & self._mask)
        return (left << self._half) | right

    def _backward(self, x: _Words) -> _Words:
        left, right = x >> self._half, x & self._mask
        for k in reversed(self._keys):
            left, right = right ^ (_mix(left + k) & self._mask), left
        return (left << self._half) | right


class WrongPosition(ValueError):
    """A saved position that is damaged or belongs to other data; the loader is unchanged."""


@dataclass(frozen=True, slots=True)
class Position:
    """The next sample of an epoch, counted over all ranks; a few numbers that fit into JSON, the same on every rank.

    `cursor` is a place in the order of the epoch, banned samples included: a ban moves no other sample.
    """

    seed: int
    length: int
    shuffle: bool
    epoch: int = 0
    cursor: int = 0
    banned: tuple[int, ...] = ()
    """Sorted."""

    def state_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"kind": KIND, "version": VERSION, **values, "banned": list(self.banned)}

    def at(self, epoch: int, cursor: int) -> Position:
        return replace(self, epoch=epoch, cursor=cursor)

    def with_banned(self, samples: set[int]) -> Position:
        return replace(self, banned=tuple(sorted(samples.union(self.banned))))

    def without_banned(self, samples: set[int]) -> Position:
        return replace(self, banned=tuple(sample for sample in self.banned if sample not in samples))

    def check_same_data(self, other: Position) -> None:
        """Raise WrongPosition unless length, seed and shuffle equal those of `other`."""
        for name, advice in _MUST_MATCH.items():
            saved, current = getattr(self, name), getattr(other, name)
            if saved != current:
                raise WrongPosition(f"the data position was saved with {name}={saved}, here it is {current}: {advice}")


_MUST_MATCH = {
    "length": "with another number of samples the order is different, so some samples would repeat or never come. "
    "Use the dataset of the saved run, or restart its data by leaving the position out.",
    "seed": "the order of the samples would be different. Pass the seed of the saved run.",
    "shuffle": "the order of the samples would be different. Pass the same shuffle= as in the saved run.",
}


def parse_position(state: object) -> Position:
    """Validate a saved state; raises WrongPosition with the reason."""
    if not isinstance(state, Mapping) or state.get("kind") != KIND:
        raise WrongPosition(f"expected a state of kind {KIND!r}, got {_summary(state)}: it belongs to another loader")
    if state.get("version") != VERSION:
        raise WrongPosition(
            f"the data position has version {state.get('version')!r}, this surefoot reads version {VERSION}: "
            "continue with the surefoot that saved it"
        )
    length = _parse_int(state, "length", 1)
    banned = _parse_banned(state, length)
    if not isinstance(state.get("shuffle"), bool):
        raise WrongPosition(f"the data position is damaged: shuffle is {state.get('shuffle')!r}, not true or false")
    return Position(
        seed=_parse_int(state, "seed", 0, 2 * _MAX_INT - 1),
        length=length,
        shuffle=state["shuffle"],
        epoch=_parse_int(state, "epoch", 0),
        cursor=_parse_int(state, "cursor", 0, length),
        banned=tuple(banned),
    )


def _parse_int(state: Mapping[str, Any], name: str, low: int, high: int = _MAX_INT - 1) -> int:
    value = state.get(name)
    if type(value) is not int or not low <= value <= high:
        raise WrongPosition(
            f"the data position is damaged: {name} is {value!r:.100}, not a whole number from {low} to {high}"
        )
    return value


def _parse_banned(state: Mapping[str, Any], length: int) -> list[int]:
    banned = state.get("banned")
    if not isinstance(banned, list | tuple) or not all(type(i) is int and 0 <= i < length for i in banned):
        raise WrongPosition(
            f"the data position is damaged: banned is {banned!r:.100}, not a list of samples below {length}"
        )
    samples = sorted(set(banned))
    if len(samples) == length:
        raise WrongPosition("the data position is damaged: every sample is banned")
    return samples


def _summary(state: object) -> str:
    if isinstance(state, Mapping):
        return f"a mapping with {', '.join(map(repr, list(state)[:5])) or 'no keys'}"
    return f"{type(state).__name__} {state!r:.60}"

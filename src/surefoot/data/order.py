"""The order of an epoch: a permutation that can be asked for any place at once and takes next to no memory.

It is arithmetic on whole numbers modulo 2**64 and nothing else, so it is the same on every platform and under every
version of Python, NumPy and torch. (NumPy promises that for the bits of its generators, not for `permutation`;
torch promises nothing of the kind for `randperm`.) What is written here must never change: `position.VERSION` names it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
_Words = NDArray[np.uint64]
_ALL = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 8
_SMALL = 1 << 16
"""Up to here a table is quicker, and a network over so few numbers would favour some orders."""


def hash_key(*parts: int) -> int:
    """64 bits that depend on every part and on their order."""
    h = 0
    for part in parts:
        h = ((h ^ (part & _ALL)) + _GOLDEN) & _ALL
        h = ((h ^ (h >> 30)) * _FIRST) & _ALL
        h = ((h ^ (h >> 27)) * _SECOND) & _ALL
        h ^= h >> 31
    return h


def _mix(x: _Words) -> _Words:
    """The same scrambling (the finish of SplitMix64) for a whole array."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


class EpochOrder:
    """Which sample stands at which place of an epoch; a function of length, seed and epoch alone."""

    def __init__(self, length: int, *, seed: int, epoch: int, shuffle: bool) -> None:
        made = _Sequence() if not shuffle else _Table(length, seed, epoch) if length <= _SMALL else None
        self._made = made or _Network(length, seed, epoch)

    def samples(self, places: Places) -> Places:
        """The samples that stand at these places."""
        return self._made.samples(places)

    def places(self, samples: Places) -> Places:
        """The places at which these samples stand."""
        return self._made.places(samples)


class _Sequence:
    """No shuffling."""

    def samples(self, places: Places) -> Places:
        return places

    def places(self, samples: Places) -> Places:
        return samples


class _Table:
    """Samples sorted by a random number each; no two are alike, so there is one way to sort them."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        gamma = np.arange(length, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._samples = np.argsort(_mix(gamma + np.uint64(hash_key(seed, epoch))))
        self._places = np.empty_like(self._samples)
        self._places[self._samples] = np.arange(length)

    def samples(self, places: Places) -> Places:
        return self._samples[places]

    def places(self, samples: Places) -> Places:
        return self._places[samples]


class _Network:
    """A Feistel network: a permutation of slightly more numbers, worked out for the ones that are asked for."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self._length = length
        # Always more numbers than there are samples: on just as many a network gives even permutations only.
        half = (length.bit_length() + 1) // 2
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._keys = [np.uint64(hash_key(seed, epoch, i)) for i in range(_ROUNDS)]

    def samples(self, places: Places) -> Places:
        return self._walk(places, back=False)

    def places(self, samples: Places) -> Places:
        return self._walk(samples, back=True)

    def _walk(self, numbers: Places, *, back: bool) -> Places:
        """What falls beyond the length is sent through again until it comes to lie within."""
        step = self._backward if back else self._forward
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

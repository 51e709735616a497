"""What a checkpoint holds, whatever file it came from: tensors that are read in parts, and a few plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating[Any]]
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"})
"""Kinds of number that are looked at; whole numbers are counters, masks, or quantised weights."""

_MANY = 1024


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    parts: Callable[[int], Iterator[Numbers]]
    """Its numbers in order, so many at a time, as float32 or float64."""

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(slots=True)
class Moments:
    """What an optimizer remembers of one parameter."""

    key: str
    tensors: dict[str, Held] = field(default_factory=dict)
    step: float | None = None


@dataclass(slots=True)
class Contents:
    """All that was found."""

    format: str
    weights: list[Held] = field(default_factory=list)
    moments: list[Moments] = field(default_factory=list)
    groups: list[dict[str, float]] = field(default_factory=list)
    """Settings of the optimizer's groups of parameters: lr, initial_lr, beta..."""
    scale: float | None = None
    """The loss scale of float16."""
    counters: dict[str, int] = field(default_factory=dict)
    """How often batch norms have seen a batch, by name."""
    losses: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    """What is wrong with the files themselves: sentences."""

    def leave_out(self, name: str, dtype: str, count: int) -> None:
        """A tensor of whole numbers."""
        quantised = count >= _MANY and "weight" in name and dtype != "bool"
        self.skipped["quantised weights" if quantised else "tensors of whole numbers (counters, masks, positions)"] += 1

    def take(self, other: Contents) -> None:
        self.weights += other.weights
        self.moments += other.moments
        self.groups += other.groups
        self.scale = other.scale if self.scale is None else self.scale
        self.counters |= other.counters
        self.losses |= other.losses
        self.step = other.step if self.step is None else self.step
        self.epoch = other.epoch if self.epoch is None else self.epoch
        self.skipped.update(other.skipped)
        self.notes += other.notes
        self.damage += other.damage


def floats(raw: NDArray[Any], dtype: str) -> Numbers:
    """Numbers from their bits: halves and less become float32."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype.startswith("float8"):
        return _eight(dtype)[raw]
    return raw.astype(np.float32) if raw.dtype.itemsize == 2 else raw


@cache
def _eight(dtype: str) -> NDArray[np.float32]:
    """All 256 values of an eight-bit float."""
    bits = np.arange(256)
    mantissa = 3 if dtype == "float8_e4m3" else 2
    bias = 7 if mantissa == 3 else 15
    exponent, fraction = (bits & 127) >> mantissa, (bits & ((1 << mantissa) - 1)) / (1 << mantissa)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if mantissa == 3:
        values[(bits & 127) == 127] = np.nan
    else:
        values[(exponent == 31) & (fraction == 0)] = np.inf
        values[(exponent == 31) & (fraction != 0)] = np.nan
    return np.where(bits & 128, -values, values).astype(np.float32)

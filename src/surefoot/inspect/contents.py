"""The contents of a checkpoint, whatever file they came from: tensors read in chunks, and a few plain values."""

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
FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"})
"""Dtypes that are checked; integer tensors are counters, masks or quantised weights."""

_MIN_QUANTISED_NUMEL = 1024


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, read on demand."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[int], Iterator[Numbers]]
    """Yields the values in order, at most the given number at a time, as float32 or float64."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(slots=True)
class ParamState:
    """The optimizer state of one parameter."""

    key: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    step: float | None = None


@dataclass(slots=True)
class CheckpointContents:
    """Everything found in a checkpoint."""

    format: str
    weights: list[StoredTensor] = field(default_factory=list)
    optimizer_state: list[ParamState] = field(default_factory=list)
    param_groups: list[dict[str, float]] = field(default_factory=list)
    """Settings per parameter group: lr, initial_lr, beta2, ..."""
    loss_scale: float | None = None
    """The float16 loss scale."""
    counters: dict[str, int] = field(default_factory=dict)
    """`num_batches_tracked` of batch norms, by name."""
    losses: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    """Sentences about damage to the files themselves."""

    def skip_integer_tensor(self, name: str, dtype: str, count: int) -> None:
        """Count an integer tensor as skipped."""
        quantised = count >= _MIN_QUANTISED_NUMEL and "weight" in name and dtype != "bool"
        self.skipped["quantised weights" if quantised else "integer tensors (counters, masks, positions)"] += 1

    def merge(self, other: CheckpointContents) -> None:
        self.weights += other.weights
        self.optimizer_state += other.optimizer_state
        self.param_groups += other.param_groups
        self.loss_scale = other.loss_scale if self.loss_scale is None else self.loss_scale
        self.counters |= other.counters
        self.losses |= other.losses
        self.step = other.step if self.step is None else self.step
        self.epoch = other.epoch if self.epoch is None else self.epoch
        self.skipped.update(other.skipped)
        self.notes += other.notes
        self.damage += other.damage


def to_floats(raw: NDArray[Any], dtype: str) -> Numbers:
    """Decode raw bits; float16 and smaller become float32."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype.startswith("float8"):
        return _float8_values(dtype)[raw]
    return raw.astype(np.float32) if raw.dtype.itemsize == 2 else raw


@cache
def _float8_values(dtype: str) -> NDArray[np.float32]:
    """All 256 values of an 8-bit float format."""
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

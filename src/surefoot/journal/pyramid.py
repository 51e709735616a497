"""Rows summed up in buckets of attempts: minimum, maximum, mean and non-finite count of each column.

Buckets are keyed by attempt, which only grows, so a rewind changes no bucket that is complete. Each level has buckets
`FACTOR` times as wide as the level below. Buckets of the same key merge, so that a bucket is one entry at all times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.journal.row_file import RowHeader
from surefoot.records import REFUSED, StepMetrics

FACTOR = 16
LEVELS = 4
SCALAR_WIDTH, LAYER_WIDTH = 64, 256
"""Attempts in a bucket of the lowest level."""
BUCKET_STATS = ("min", "max", "mean", "finite", "nonfinite")
"""`min`, `max` and `mean` are over the finite values, `finite` and `nonfinite` are counts; absent values count in
neither."""
MIN, MAX, MEAN, FINITE, NONFINITE = range(5)
REFUSED_COLUMN = "refused"
"""1 for an update that surefoot refused, else 0."""
SCALAR_COLUMNS = (
    "loss", "progress", "norm", "norm_limit", "nonfinite", "clip_factor", "lr", "loss_scale", "weight_norm",
    "update_ratio", "nonfinite_params", "eval_loss", "seconds", "data_wait", "samples", "tokens", "memory",
    "memory_peak", "memory_reserved", "utilisation", "seconds_left", REFUSED_COLUMN,
)  # fmt: skip
_NEVER_ABSENT = ("loss", "norm")
"""Columns in which NaN is a value: what a run computes at every step."""


def bucket_header(kind: str, names: Sequence[str]) -> RowHeader:
    """The header of a file of buckets; `attempt`, `step` and `time` are those of the last row, `first` of the first."""
    shape = (len(names), len(BUCKET_STATS))
    columns = (
        ("step", "<i8", ()),
        ("attempt", "<i8", ()),
        ("first", "<i8", ()),
        ("time", "<f8", ()),
        ("rows", "<i8", ()),
        ("stats", "<f4", shape),
    )
    return RowHeader(kind=f"pyramid-{kind}", columns=columns, names=tuple(names), stats=BUCKET_STATS)


@dataclass(frozen=True, slots=True)
class PyramidInput:
    """Rows as a pyramid takes them in: absent values are NaN, non-finite ones are infinite."""

    steps: np.ndarray
    attempts: np.ndarray
    times: np.ndarray
    values: np.ndarray
    """[rows, columns], float32."""


def scalar_input(rows: np.ndarray) -> PyramidInput:
    """Rows of a scalars file, with the columns `SCALAR_COLUMNS`."""
    known = rows.dtype.names or ()
    values = np.full((len(rows), len(SCALAR_COLUMNS)), np.nan, np.float32)
    for at, name in enumerate(SCALAR_COLUMNS):
        if name in known:
            values[:, at] = rows[name]
        if name in _NEVER_ABSENT and name in known:
            values[np.isnan(values[:, at]), at] = np.inf
    if "verdict" in known:
        values[:, -1] = np.isin(rows["verdict"], REFUSED)
    times = rows["time"] if "time" in known else np.zeros(len(rows))
    return PyramidInput(rows["step"].astype(np.int64), rows["attempt"].astype(np.int64), times, values)


def layer_input(header: RowHeader, rows: np.ndarray) -> PyramidInput:
    """Gradient norms from the rows of a layers file; infinite where any value was not finite."""
    stats = rows["stats"]
    norms = stats[:, :, header.stats.index("norm")].astype(np.float32)
    if "nonfinite" in header.stats:
        counts = stats[:, :, header.stats.index("nonfinite")]
        norms[(counts > 0) | np.isnan(norms)] = np.inf
        norms[counts == -1] = np.nan
    return PyramidInput(rows["step"].astype(np.int64), rows["attempt"].astype(np.int64), np.zeros(len(rows)), norms)


def reduce_rows(rows: PyramidInput, keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """One entry for each run of equal keys."""
    starts, ends = _runs(keys)
    entries = np.zeros(len(starts), dtype)
    if not len(starts):
        return entries
    finite = np.isfinite(rows.values)
    values = np.where(finite, rows.values, np.float32(np.nan))
    _fill_meta(entries, rows.steps, rows.attempts, rows.attempts, rows.times, starts, ends)
    entries["rows"] = ends - starts
    stats = entries["stats"]
    stats[..., MIN] = np.fmin.reduceat(values, starts)
    stats[..., MAX] = np.fmax.reduceat(values, starts)
    counts = np.add.reduceat(finite, starts, dtype=np.float64)
    totals = np.add.reduceat(np.where(finite, rows.values, np.float32(0)), starts, dtype=np.float64)
    with np.errstate(all="ignore"):
        stats[..., MEAN] = totals / counts
    stats[..., FINITE] = counts
    stats[..., NONFINITE] = np.add.reduceat(np.isinf(rows.values), starts, dtype=np.float64)
    return entries


def merge_entries(entries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """One entry for each run of equal keys, of the entries in it."""
    starts, ends = _runs(keys)
    if len(starts) == len(entries):
        return entries
    merged = np.zeros(len(starts), entries.dtype)
    _fill_meta(merged, entries["step"], entries["attempt"], entries["first"], entries["time"], starts, ends)
    merged["rows"] = np.add.reduceat(entries["rows"], starts)
    stats, sources = merged["stats"], entries["stats"]
    stats[..., MIN] = np.fmin.reduceat(sources[..., MIN], starts)
    stats[..., MAX] = np.fmax.reduceat(sources[..., MAX], starts)
    counts = sources[..., FINITE].astype(np.float64)
    sums = np.where(counts > 0, sources[..., MEAN], np.float32(0)) * counts
    total = np.add.reduceat(counts, starts)
    with np.errstate(all="ignore"):
        stats[..., MEAN] = np.add.reduceat(sums, starts) / total
    stats[..., FINITE] = total
    stats[..., NONFINITE] = np.add.reduceat(sources[..., NONFINITE], starts)
    return merged


def _runs(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(keys):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(keys)) + 1))
    return starts, np.append(starts[1:], len(keys))


def _fill_meta(
    entries: np.ndarray,
    steps: np.ndarray,
    attempts: np.ndarray,
    firsts: np.ndarray,
    times: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
) -> None:
    entries["step"], entries["attempt"], entries["time"] = steps[ends - 1], attempts[ends - 1], times[ends - 1]
    entries["first"] = firsts[starts]


class BucketStack:
    """The open bucket of each level; rows go in, complete buckets come out."""

    def __init__(self, header: RowHeader, width: int) -> None:
        self.header, self.width = header, width
        self.open: list[np.ndarray] = [np.zeros(0, header.dtype) for _ in range(LEVELS)]
        """At most one entry per level."""
        self.after = -1
        """Rows up to this attempt are in complete buckets of the lowest level; they are not taken in again."""

    def add(self, rows: PyramidInput) -> list[np.ndarray]:
        """Take in rows in order of attempts; returns the buckets of each level that this completed."""
        new = rows.attempts > self.after
        if not new.all():
            rows = PyramidInput(rows.steps[new], rows.attempts[new], rows.times[new], rows.values[new])
        entries = reduce_rows(rows, rows.attempts // self.width, self.header.dtype)
        done = []
        for level in range(LEVELS):
            entries = self.push(level, entries)
            done.append(entries)
        if len(done[0]):
            self.after = (int(done[0]["first"][-1]) // self.width + 1) * self.width - 1
        return done

    def push(self, level: int, entries: np.ndarray) -> np.ndarray:
        """Take entries into the open bucket of a level; returns those that are complete."""
        if not len(entries):
            return entries
        entries = np.concatenate((self.open[level], entries))
        merged = merge_entries(entries, entries["first"] // (self.width * FACTOR**level))
        self.open[level] = merged[-1:].copy()
        return merged[:-1]


def scalar_header() -> RowHeader:
    assert set(SCALAR_COLUMNS) - {REFUSED_COLUMN} <= set(StepMetrics.__slots__)
    return bucket_header("scalars", SCALAR_COLUMNS)

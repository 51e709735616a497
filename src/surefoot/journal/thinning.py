"""Which old per-layer rows to drop next, and dropping them so that a kill at any moment loses or doubles none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from surefoot.journal.row_file import RowHeader, load_rows, write_atomically
from surefoot.journal.segments import Segment, make_segment
from surefoot.records import Verdict

_GOLDEN = 0x9E3779B97F4A7C15
_MIN_MERGED_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLimits:
    """How much per-layer history a run may keep."""

    window: int
    """The newest rows, kept in full."""
    segment_rows: int
    """Rows in a segment."""
    budget: int
    """Bytes in all."""

    @classmethod
    def for_row_size(cls, row_bytes: int, *, window: int, budget: int) -> HistoryLimits:
        """Limits for rows of this size; the window shrinks so that it takes at most half the budget."""
        window = max(1, min(window, budget // 2 // row_bytes))
        return cls(window=window, segment_rows=max(1, window // 20), budget=budget)


@dataclass(frozen=True, slots=True)
class ClosedSegment:
    """A segment that no longer grows."""

    segment: Segment
    header: RowHeader
    rows: int
    size: int

    @property
    def covers(self) -> int:
        """Rows that were recorded here, before any were dropped."""
        return self.header.covers or self.rows


@dataclass(frozen=True, slots=True)
class ThinningJob:
    """Make one file of one segment or of two neighbours."""

    segments: tuple[ClosedSegment, ...]
    landed_stride: int
    refused_stride: int
    halve: bool = False
    """Drop about every second row, of whichever are more: applied or refused updates."""


def next_job(
    closed: Sequence[ClosedSegment], limits: HistoryLimits, *, newer_rows: int, open_bytes: int
) -> ThinningJob | None:
    """The most useful job now; the open segment holds `newer_rows` rows in `open_bytes` bytes.

    Rows are complete within the window; beyond it, each doubling of the age halves the rows kept, so the whole history
    costs window * (1 + log2(rows / window) / 2) rows. If that exceeds the budget, the largest segments are halved.
    """
    old: list[ClosedSegment] = []
    for segment in reversed(closed):
        if newer_rows >= limits.window:
            stride = 1 << (newer_rows // limits.window).bit_length()
            if segment.header.landed_stride < stride:
                return ThinningJob((segment,), stride, segment.header.refused_stride)
            old.append(segment)
        newer_rows += segment.covers
    old.reverse()
    over_budget = sum(segment.size for segment in closed) + open_bytes > limits.budget
    merge = _merge_job(old, max_rows=max(_MIN_MERGED_ROWS, limits.segment_rows * 5 // 4), any_stride=over_budget)
    if merge is not None or not over_budget or not old:
        return merge
    largest = max(old, key=lambda segment: segment.rows)
    return ThinningJob((largest,), largest.header.landed_stride, largest.header.refused_stride, halve=True)


def _merge_job(old: Sequence[ClosedSegment], *, max_rows: int, any_stride: bool) -> ThinningJob | None:
    for first, second in pairwise(old):
        if first.rows + second.rows > max_rows or first.header.layout != second.header.layout:
            continue
        landed = (first.header.landed_stride, second.header.landed_stride)
        refused = (first.header.refused_stride, second.header.refused_stride)
        if any_stride or (landed[0] == landed[1] and refused[0] == refused[1]):
            return ThinningJob((first, second), max(landed), max(refused))
    return None


def run_job(job: ThinningJob) -> ClosedSegment | None:
    """Write the thinned file, put it in place and remove its sources; None if no row was left."""
    loaded = [load_rows(closed.segment.path)[1] for closed in job.segments]
    kept, landed, refused = thin_rows(np.concatenate(loaded), job)
    first, last = job.segments[0], job.segments[-1]
    target = make_segment(first.segment.path.parent, "layers", first.segment.first, last.segment.last)
    thinned = None
    if len(kept):
        covers = sum(closed.covers for closed in job.segments)
        header = replace(first.header, landed_stride=landed, refused_stride=refused, covers=covers)
        line = header.encode()
        write_atomically(target.path, line, kept.tobytes())
        thinned = ClosedSegment(target, header, len(kept), len(line) + kept.nbytes)
    # Until the sources are gone these rows exist twice; readers skip files whose numbers lie within the new one's.
    for source in job.segments:
        if thinned is None or source.segment.path != target.path:
            source.segment.path.unlink(missing_ok=True)
    return thinned


def thin_rows(rows: np.ndarray, job: ThinningJob) -> tuple[np.ndarray, int, int]:
    """The rows to keep, and their strides for applied and refused updates."""
    landed, refused = job.landed_stride, job.refused_stride
    if not job.halve:
        return rows[_keep_mask(rows, landed, refused)], landed, refused
    if len(rows) < 2:
        return rows[:0], landed, refused
    mostly_refused = 2 * np.count_nonzero(rows["verdict"] != Verdict.APPLIED) > len(rows)
    keep = np.ones(len(rows), bool)
    # A doubled stride may by chance keep every row of a small segment: double until some row is dropped.
    while keep.all() and max(landed, refused) < 1 << 63:
        landed, refused = (landed, 2 * refused) if mostly_refused else (2 * landed, refused)
        keep = _keep_mask(rows, landed, refused)
    return (rows[:1] if keep.all() else rows[keep]), landed, refused


def _keep_mask(rows: np.ndarray, landed: int, refused: int) -> np.ndarray:
    applied = rows["verdict"] == Verdict.APPLIED
    return np.where(applied, keep_one_in(rows["attempt"], landed), keep_one_in(rows["attempt"], refused))


def keep_one_in(attempts: np.ndarray, stride: int) -> np.ndarray:
    """A mask of one in `stride` attempts, evenly spread, attempt 0 always included.

    Multiples of the golden ratio spread evenly over a circle, and those on its first 1/stride are kept. Unlike every
    n-th attempt this favours none of several alternating optimizers, and a larger stride keeps a subset of a smaller.
    """
    angles = attempts.astype(np.uint64) * np.uint64(_GOLDEN)
    return angles <= np.uint64((2**64 - 1) // stride)

"""Which old per-layer rows to take out next, and taking them out so that a kill at any moment loses or doubles none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from surefoot.journal.append import write_atomically
from surefoot.journal.row_file import RowHeader, load_rows
from surefoot.journal.segments import Segment, make_segment
from surefoot.records import Verdict

_GOLDEN = 0x9E3779B97F4A7C15
_FEW = 8


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
        """Bounds for rows of this size: where `window` rows would fill over half the budget, fewer are kept in full."""
        window = max(1, min(window, budget // 2 // row_bytes))
        return cls(window=window, chunk=max(1, window // 20), budget=budget)


@dataclass(frozen=True, slots=True)
class ClosedSegment:
    """A segment that no longer grows."""

    segment: Segment
    header: RowHeader
    rows: int
    size: int

    @property
    def covers(self) -> int:
        return self.header.covers or self.rows


@dataclass(frozen=True, slots=True)
class ThinningJob:
    """One file to make of one part or of two neighbours."""

    segments: tuple[ClosedSegment, ...]
    landed_stride: int
    refused_stride: int
    halve: bool = False
    """Take out about every second row more, first of those that are the most: landed or refused."""


def next_job(parts: Sequence[ClosedSegment], bounds: HistoryLimits, *, newer_rows: int, open_bytes: int) -> ThinningJob | None:
    """The most useful thing to do now; `newer` rows in `growing` bytes stand in the segment still written to.

    A row leaves the window in full and from then on every doubling of its age halves the rows that stay, so the whole
    history costs window * (1 + log2(rows / window) / 2) rows. If that is over budget, more goes from where most is.
    """
    old: list[ClosedSegment] = []
    for part in reversed(parts):
        if newer_rows >= bounds.window:
            wanted = 1 << (newer_rows // bounds.window).bit_length()
            if part.header.landed_stride < wanted:
                return ThinningJob((part,), wanted, part.header.refused_stride)
            old.append(part)
        newer_rows += part.covers
    old.reverse()
    over = sum(part.size for part in parts) + open_bytes > bounds.budget
    merge = _merge(old, most=max(_FEW, bounds.segment_rows * 5 // 4), any_stride=over)
    if merge is not None or not over or not old:
        return merge
    fattest = max(old, key=lambda part: part.rows)
    return ThinningJob((fattest,), fattest.header.landed_stride, fattest.header.refused_stride, halve=True)


def _merge(old: Sequence[ClosedSegment], *, most: int, any_stride: bool) -> ThinningJob | None:
    for one, two in pairwise(old):
        if one.rows + two.rows > most or one.header.layout != two.header.layout:
            continue
        landed = (one.header.landed_stride, two.header.landed_stride)
        refused = (one.header.refused_stride, two.header.refused_stride)
        if any_stride or (landed[0] == landed[1] and refused[0] == refused[1]):
            return ThinningJob((one, two), max(landed), max(refused))
    return None


def run_job(job: ThinningJob) -> ClosedSegment | None:
    """Write the file a job asks for, put it in place, and remove what it was made from; None if no row was left."""
    loaded = [load_rows(part.segment.path)[1] for part in job.segments]
    kept, landed, refused = thin_rows(np.concatenate(loaded), job)
    first, last = job.segments[0], job.segments[-1]
    made = make_segment(first.segment.path.parent, "layers", first.segment.first, last.segment.last)
    part = None
    if len(kept):
        covers = sum(part.covers for part in job.segments)
        header = replace(first.header, landed_stride=landed, refused_stride=refused, covers=covers)
        line = header.encode()
        write_atomically(made.path, line, kept.tobytes())
        part = ClosedSegment(made, header, len(kept), len(line) + kept.nbytes)
    # From here on a reader finds these rows twice, and leaves out the files whose numbers lie within the new one's.
    for source in job.segments:
        if part is None or source.segment.path != made.path:
            source.segment.path.unlink(missing_ok=True)
    return part


def thin_rows(rows: np.ndarray, job: ThinningJob) -> tuple[np.ndarray, int, int]:
    """The rows that stay, and the strides they now stand for."""
    landed, refused = job.landed_stride, job.refused_stride
    if not job.halve:
        return rows[_stays(rows, landed, refused)], landed, refused
    if len(rows) < 2:
        return rows[:0], landed, refused
    mostly_refused = 2 * np.count_nonzero(rows["verdict"] != Verdict.APPLIED) > len(rows)
    stays = np.ones(len(rows), bool)
    # A doubled stride may by chance spare a small part; double until something goes.
    while stays.all() and max(landed, refused) < 1 << 63:
        landed, refused = (landed, 2 * refused) if mostly_refused else (2 * landed, refused)
        stays = _stays(rows, landed, refused)
    return (rows[:1] if stays.all() else rows[stays]), landed, refused


def _stays(rows: np.ndarray, landed: int, refused: int) -> np.ndarray:
    is_landed = rows["verdict"] == Verdict.APPLIED
    return np.where(is_landed, keep_one_in(rows["attempt"], landed), keep_one_in(rows["attempt"], refused))


def keep_one_in(attempts: np.ndarray, stride: int) -> np.ndarray:
    """One in `stride` attempts, evenly spread, the first always among them.

    Multiples of the golden ratio spread evenly over a circle, and those on its first 1/stride stay. Unlike every n-th
    attempt this favours none of several optimizers that take turns, and a larger stride keeps a subset of a smaller.
    """
    around = attempts.astype(np.uint64) * np.uint64(_GOLDEN)
    return around <= np.uint64((2**64 - 1) // stride)

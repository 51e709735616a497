"""What a story asks of the rows, answered from the mapped files: only the rows around an incident are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.journal.pyramid_reader import MappedRows
from surefoot.records import REFUSED, Verdict
from surefoot.story.row_facts import APPLIED_TO_CONFIRM

_FURTHER = 1 << 62
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class MappedFacts:
    """A `RowLookup` over the files of a run, which may have a million rows."""

    segments: Sequence[MappedRows]

    @property
    def last_attempt(self) -> int:
        return int(self.segments[-1].rows["attempt"][-1]) if self.segments else -1

    @property
    def ends_refused(self) -> bool:
        return bool(self.segments) and int(_verdicts(self.segments[-1].rows[-1:])[0]) in REFUSED

    def refused_between(self, first: int, last: int) -> int:
        return sum(int(np.isin(_verdicts(rows), REFUSED).sum()) for rows in self._chunks(first, last))

    def applied_between(self, first: int, last: int) -> int:
        return sum(int((_verdicts(rows) == Verdict.APPLIED).sum()) for rows in self._chunks(first, last))

    def last_refusal_of_streak(self, attempt: int) -> int:
        last = attempt
        for rows in self._chunks(attempt, _FURTHER):
            others = np.flatnonzero(~np.isin(_verdicts(rows), REFUSED))
            refused = rows[: others[0]] if len(others) else rows
            if len(refused):
                last = int(refused["attempt"][-1])
            if len(others):
                break
        return last

    def loss_after(self, attempt: int) -> float | None:
        rows = next(self._chunks(attempt + APPLIED_TO_CONFIRM, _FURTHER), None)
        if rows is None or _verdicts(rows[:1])[0] != Verdict.APPLIED:
            return None
        return float(rows["loss"][0]) if "loss" in (rows.dtype.names or ()) else float("nan")

    def _chunks(self, first: int, last: int) -> Iterator[np.ndarray]:
        """The rows of these attempts, a few at a time."""
        for mapped in self.segments:
            start, end = mapped.between(first, last)
            for at in range(start, end, _CHUNK):
                yield mapped.rows[at : min(at + _CHUNK, end)]


def _verdicts(rows: np.ndarray) -> np.ndarray:
    return rows["verdict"] if "verdict" in (rows.dtype.names or ()) else np.zeros(len(rows), np.int64)

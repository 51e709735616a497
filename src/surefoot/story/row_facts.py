"""The few facts of a run's rows that a story needs besides its events: what was refused, and how it went on."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from surefoot.journal.columns import Scalars
from surefoot.records import REFUSED, StepMetrics, Verdict

APPLIED_TO_CONFIRM = 5
"""Attempts to wait after the last refusal before it is reported that refusing helped."""
_MOST_ROWS = 4096


class RowLookup(Protocol):
    """What a story asks of the rows of a run."""

    @property
    def last_attempt(self) -> int:
        """-1 if there are no rows."""
        ...

    @property
    def ends_refused(self) -> bool:
        """Whether the last update was refused."""
        ...

    def refused_between(self, first: int, last: int) -> int:
        """Updates refused from one attempt to another, both included."""
        ...

    def applied_between(self, first: int, last: int) -> int:
        """Updates applied from one attempt to another, both included."""
        ...

    def last_refusal_of_streak(self, attempt: int) -> int:
        """The attempt of the last refusal in a row that goes on from this one."""
        ...

    def loss_after(self, attempt: int) -> float | None:
        """The loss once updates are applied again, `APPLIED_TO_CONFIRM` attempts after a refusal; None before."""
        ...


@dataclass(slots=True)
class RowFacts:
    """Attempt, verdict and loss of each row, in order."""

    attempts: list[int] = field(default_factory=list)
    verdicts: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, scalars: Scalars) -> RowFacts:
        """Those of a run that was read."""
        if not scalars.rows or "attempt" not in scalars:
            return cls()
        attempts = np.asarray(scalars["attempt"]).tolist()
        verdicts = np.asarray(scalars["verdict"]).tolist() if "verdict" in scalars else [0] * len(attempts)
        losses = np.asarray(scalars["loss"]).tolist() if "loss" in scalars else [np.nan] * len(attempts)
        return cls(attempts, verdicts, losses)

    def add(self, row: StepMetrics) -> None:
        """A row of a live run; only the newest are kept."""
        self.attempts.append(row.attempt)
        self.verdicts.append(int(row.verdict))
        self.losses.append(row.loss)
        if len(self.attempts) > _MOST_ROWS:
            for values in (self.attempts, self.verdicts, self.losses):
                del values[: _MOST_ROWS // 2]

    @property
    def last_attempt(self) -> int:
        return self.attempts[-1] if self.attempts else -1

    @property
    def ends_refused(self) -> bool:
        return bool(self.verdicts) and self.verdicts[-1] in REFUSED

    def _index(self, attempt: int) -> int:
        return bisect_left(self.attempts, attempt)

    def refused_between(self, first: int, last: int) -> int:
        return sum(v in REFUSED for v in self.verdicts[self._index(first) : self._index(last + 1)])

    def applied_between(self, first: int, last: int) -> int:
        return sum(v == Verdict.APPLIED for v in self.verdicts[self._index(first) : self._index(last + 1)])

    def last_refusal_of_streak(self, attempt: int) -> int:
        last = attempt
        for k in range(self._index(attempt), len(self.attempts)):
            if self.verdicts[k] not in REFUSED:
                break
            last = self.attempts[k]
        return last

    def loss_after(self, attempt: int) -> float | None:
        k = self._index(attempt + APPLIED_TO_CONFIRM)
        return self.losses[k] if k < len(self.attempts) and self.verdicts[k] == Verdict.APPLIED else None

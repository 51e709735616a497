"""What is worth saying about a log that grows: what is new, and what is to be believed yet."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.logs.answer import LogDiagnosis, RunHealth
from surefoot.records import Pattern

PERMANENT = frozenset({Pattern.NONFINITE, Pattern.COLLAPSE_TO_ZERO})
"""Failures that do not pass."""
MORE, LONGER = 3, 10
"""Losses that have to come after a failure before it is believed: one that does not pass, and one that may."""


@dataclass(frozen=True, slots=True)
class ReportedTrouble:
    """A trouble that was told: what it was, and how far the log went then."""

    verdict: RunHealth
    pattern: str
    last: float


class NewsFilter:
    """Knows what was told already: each trouble once, unless it began anew after that."""

    def __init__(self) -> None:
        self._told: list[ReportedTrouble] = []
        self._state = RunHealth.UNKNOWN

    def is_news(self, answer: LogDiagnosis) -> bool:
        """Whether there is something new to say."""
        before, self._state = self._state, answer.verdict
        if answer.verdict is RunHealth.HEALTHY:
            return before in (RunHealth.WARNING, RunHealth.FAILED)
        if not answer.is_trouble:
            return False
        last = float(answer.last_step or 0)
        onset = float(answer.onset_step or 0)
        known = [one for one in self._told if (one.verdict, one.pattern) == (answer.verdict, str(answer.pattern))]
        new = all(onset > one.last for one in known)
        if new:
            self._told.append(ReportedTrouble(answer.verdict, str(answer.pattern), last))
        return new


class FailureConfirmer:
    """Whether a failure is to be believed yet: enough losses came after it began, or no more come.

    A loss that jumped may come back, and a script that kills the run on our word cannot take that back; a NaN stays.
    """

    def __init__(self) -> None:
        self._seen: int | None = None
        """How many losses there were when the failure was first seen."""
        self._new = True

    def is_confirmed(self, answer: LogDiagnosis, *, quiet: bool, over: bool) -> bool:
        """`quiet`: no line has come for a moment; `over`: nor will one, as far as anybody can tell."""
        new, self._new = self._new, False
        if answer.verdict is not RunHealth.FAILED:
            self._seen = None
            return True
        if over or answer.curves is None:
            return True
        if answer.pattern is Pattern.NONE:  # an exception, after which the run may still have gone on
            return quiet
        steps = answer.curves.loss.steps
        since = len(steps) if self._seen is None else self._seen
        self._seen = since
        lasts = answer.pattern in PERMANENT
        if answer.onset_step is not None and (lasts or new):  # what was there before us need not be waited for
            since = min(since, int((steps <= answer.onset_step).sum()))
        wanted = MORE if lasts else max(LONGER, len(steps) // 20)
        return len(steps) - since >= wanted

"""The diagnosis of a log: what went wrong, when it began, why, and what to do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from surefoot.journal.strict_json import plain
from surefoot.records import Cause, Pattern

if TYPE_CHECKING:
    from surefoot.logs.run_curves import RunCurves
    from surefoot.story.run_story import RunStory


class UnreadableInput(ValueError):
    """A log or checkpoint cannot be read; the message says what is wrong, where, and what to do."""


class RunHealth(StrEnum):
    """Health of a run; `verdict` in the JSON."""

    HEALTHY = "healthy"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCause:
    """A possible cause with its evidence and advice."""

    cause: Cause
    confidence: float
    evidence: tuple[str, ...]
    """Sentences with numbers."""
    advice: tuple[str, ...]
    """What to do, in the order to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDiagnosis:
    """The result of diagnosing one log, most important first."""

    verdict: RunHealth
    pattern: Pattern = Pattern.NONE
    sentence: str
    """The diagnosis in one sentence."""
    onset_step: int | None = None
    """The step at which the trouble began."""
    last_step: int | None = None
    causes: tuple[RankedCause, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    """path, format, points, columns (role to column name), skipped (reason to count)."""
    notes: tuple[str, ...] = ()
    curves: RunCurves | None = None
    """The curves it is based on, for plots; not part of the JSON."""
    story: RunStory | None = None
    """What the run itself tells, if it is a surefoot run: every incident, and what was done."""

    @property
    def is_trouble(self) -> bool:
        return self.verdict in (RunHealth.WARNING, RunHealth.FAILED)

    def __repr__(self) -> str:
        from surefoot.logs.report.terminal_page import as_text

        return as_text(self).rstrip()

    def _repr_html_(self) -> str:
        from surefoot.logs.report.html_page import notebook_html

        return notebook_html(self)

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": str(self.verdict),
            "pattern": str(self.pattern),
            "sentence": self.sentence,
            "onset_step": self.onset_step,
            "last_step": self.last_step,
            "causes": [
                {
                    "cause": str(ranked.cause),
                    "confidence": round(ranked.confidence, 3),
                    "evidence": list(ranked.evidence),
                    "advice": list(ranked.advice),
                }
                for ranked in self.causes
            ],
            "source": plain(dict(self.source)),
            "notes": list(self.notes),
        } | ({} if self.story is None else {"story": plain(self.story.as_json())})


PathLike = str | os.PathLike[str]

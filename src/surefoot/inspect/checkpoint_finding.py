"""A finding about a checkpoint, before it becomes a `LogDiagnosis`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.logs.log_diagnosis import RankedCause, RunHealth
from surefoot.records import Cause, Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFinding:
    """One problem of a checkpoint."""

    verdict: RunHealth
    sentence: str
    cause: RankedCause
    pattern: Pattern = Pattern.NONE


def make_finding(
    verdict: RunHealth,
    sentence: str,
    cause: Cause,
    *,
    confidence: float,
    evidence: Sequence[str] = (),
    advice: Sequence[str],
    pattern: Pattern = Pattern.NONE,
) -> CheckpointFinding:
    ranked = RankedCause(
        cause=cause, confidence=confidence, evidence=tuple(evidence) or (sentence,), advice=tuple(advice)
    )
    return CheckpointFinding(verdict=verdict, sentence=sentence, cause=ranked, pattern=pattern)


def list_names(names: Sequence[str], max_names: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - max_names:,} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more

"""What is found in a checkpoint, in the words of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.logs.answer import RankedCause, RunHealth
from surefoot.records import Cause, Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    state: RunHealth
    sentence: str
    named: RankedCause
    pattern: Pattern = Pattern.NONE


def finding(
    state: RunHealth,
    sentence: str,
    cause: Cause,
    *,
    confidence: float,
    evidence: Sequence[str] = (),
    advice: Sequence[str],
    pattern: Pattern = Pattern.NONE,
) -> Finding:
    named = RankedCause(cause=cause, confidence=confidence, evidence=tuple(evidence) or (sentence,), advice=tuple(advice))
    return Finding(state=state, sentence=sentence, named=named, pattern=pattern)


def listed(names: Sequence[str], most: int = 3) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

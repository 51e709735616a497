"""Builds the diagnoses of an incident: the three likeliest causes with evidence, advice and the path to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from surefoot.judge.cause_catalog import CAUSES
from surefoot.judge.decision_tree import Facts, walk
from surefoot.judge.incident import Incident, evidence_of
from surefoot.judge.rank_causes import rank_causes
from surefoot.records import Diagnosis, Finding, Pattern, StepMetrics

NO_DIAGNOSIS = frozenset({"clipping", "periodic_spikes", "replicas", "progress"})
"""Detectors whose findings need no diagnosis."""
REPORT_ONLY = frozenset(
    {
        "clipping",
        "periodic_spikes",
        "progress",
        "idle_device",
        "slow_steps",
        "memory_growth",
        "plateau",
        "repeated_batches",
        "large_initial_grads",
        "eval_rise",
    }
)
"""Detectors whose findings are reported, with their cause, and never a reason to act."""


def diagnose_incident(row: StepMetrics, incident: Incident, *, has_good_state: bool) -> list[Diagnosis]:
    """The likeliest causes, the first with all evidence and the advice of the decision tree."""
    path = walk(
        Facts(
            step=row.step,
            mixed_precision=not math.isnan(row.loss_scale),
            scaled=not math.isnan(row.loss_scale),
            large_gradients=incident.first.log_norm_ratio > math.log(incident.thresholds.norm_jump_ratio),
            good_state=has_good_state,
            pattern=_first_pattern(incident.findings),
        )
    )
    evidence = evidence_of(incident) | {"path": path.as_text()}
    return [
        Diagnosis(
            step=row.step,
            attempt=row.attempt,
            time=row.time,
            cause=cause,
            confidence=confidence,
            evidence=evidence if place == 0 else {},
            advice=CAUSES[cause].remedies if place else (*CAUSES[cause].remedies, *path.advice),
            detail=f"{CAUSES[cause].sentence} {reason}",
        )
        for place, (cause, confidence, reason) in enumerate(rank_causes(incident)[:3])
    ]


def _first_pattern(findings: Sequence[Finding]) -> Pattern:
    return next((f.pattern for f in findings if f.pattern is not Pattern.NONE), Pattern.NONE)


def is_report_only(finding: Finding) -> bool:
    """Reported, and never a reason to act."""
    return finding.detector in REPORT_ONLY or (finding.detector == "replicas" and not finding.severe)

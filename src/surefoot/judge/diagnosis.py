"""The words for an incident: its three likeliest causes with evidence and advice, and why a run was stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.judge.case_facts import CaseFacts
from surefoot.judge.cause_catalog import CAUSES, MACHINE_CAUSES
from surefoot.judge.decision_tree import Facts, walk
from surefoot.judge.incident import Incident, evidence_of
from surefoot.judge.rank_causes import TRIAL_CONFIDENCE, rank_causes
from surefoot.records import Cause, Decision, Diagnosis, Finding, FindingKind, Pattern, Severity, StepMetrics, Verdict

MACHINE_DETECTORS = frozenset({FindingKind.SLOW_STEPS, FindingKind.IDLE_DEVICE, FindingKind.MEMORY_GROWTH})
"""Detectors that look at the machine and not at the training."""


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
    causes = rank_causes(incident)[:3]
    evidence = evidence_of(incident)
    reported_only = all(f.severity is Severity.REPORT_ONLY for f in incident.findings)
    about_run = causes[0][0] not in MACHINE_CAUSES and not reported_only  # the tree is about runs that failed
    if about_run:
        evidence |= {"path": path.as_text()}
    # What one part of the model shows belongs to the first diagnosis, the only one that a console prints.
    part_hint = CaseFacts(incident).language_hint
    hint = f" {part_hint}" if part_hint and part_hint not in causes[0][2] else ""
    return [
        Diagnosis(
            step=row.step,
            attempt=row.attempt,
            time=row.time,
            cause=cause,
            confidence=confidence,
            evidence=evidence if place == 0 else {},
            advice=(*CAUSES[cause].remedies, *(path.advice if about_run and not place else ())),
            detail=f"{CAUSES[cause].sentence} {reason}" + (hint if place == 0 else ""),
        )
        for place, (cause, confidence, reason) in enumerate(causes)
    ]


def diagnosis_by_trial(decision: Decision, cause: Cause, detail: str, trial: Mapping[str, Any]) -> Diagnosis:
    """The cause that a trial has shown, where the incident had been put down to another one."""
    return Diagnosis(
        step=decision.step,
        attempt=decision.attempt,
        time=decision.time,
        cause=cause,
        confidence=TRIAL_CONFIDENCE,
        evidence={"trial": trial},
        advice=CAUSES[cause].remedies,
        detail=f"{CAUSES[cause].sentence} by trial: {detail}",
    )


def _first_pattern(findings: Sequence[Finding]) -> Pattern:
    return next((f.pattern for f in findings if f.pattern is not Pattern.NONE), Pattern.NONE)


def refused_reason(row: StepMetrics, refused: int, last: str, *, waiting: bool) -> str:
    """Too many updates in a row were refused; `waiting` while harmful data was being waited out."""
    if waiting:
        way_out = "Training on such batches made the eval loss worse: check the data since then."
    elif row.nonfinite_params > 0:
        way_out = "The weights themselves are damaged: resume from an earlier checkpoint."
    elif row.verdict is Verdict.NORM_OUTLIER:
        way_out = (
            "Check the batches since then, lower the learning rate or clip. If such norms are expected, allow them "
            "with policy=surefoot.Policy(max_norm_ratio=...)."
        )
    else:
        way_out = "Check the batches since then; lower the learning rate, clip, or use bfloat16 or float32."
    return (
        f"{refused} updates in a row were refused, the last at step {row.step} (attempt {row.attempt})"
        f"{f': {last}' if last else ''}. None of them changed weights or optimizer. {way_out}"
    )


def overflow_reason(row: StepMetrics, overflows: int) -> str:
    """Too many overflows of the loss scale in a row."""
    return (
        f"the loss scale overflowed {overflows} times in a row (it is now {row.loss_scale:.3g}), so no update was "
        "applied: the gradients themselves are not finite. Use bfloat16 or float32, or check the batches since then."
    )

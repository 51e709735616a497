"""The finding about where a non-finite value came from: the module, and the operation where it is known."""

from __future__ import annotations

from surefoot.judge.detectors.base import finding_at
from surefoot.judge.evidence import OriginEvidence
from surefoot.judge.param_roles import GradProblem, cause_at_module, cause_of_role, role_of
from surefoot.origin_record import Origin, OriginKind
from surefoot.records import Cause, Finding, FindingKind, Pattern, StepMetrics


def origin_finding(
    row: StepMetrics,
    module: str,
    kind: str,
    *,
    inputs: bool = False,
    weights: bool = False,
    origin: Origin | None = None,
) -> Finding:
    """A non-finite or huge value of this row first appeared in a module; `inputs` and `weights` say whether it was
    there before. With `origin` the operation is known, too."""
    if origin is None:
        cause, reason = cause_at_module(module, kind, inputs=inputs, weights=weights)
    else:
        inputs, weights = origin.kind is OriginKind.BATCH, origin.kind is OriginKind.WEIGHTS
        cause, reason = cause_of_origin(origin)
    evidence = OriginEvidence(
        module=module,
        kind=kind,
        inputs=inputs,
        weights=weights,
        cause=cause,
        origin=None if origin is None else origin.as_json(),
    )
    large = origin is not None and origin.kind is OriginKind.LARGE_SAMPLE
    pattern = Pattern.NONE if large else Pattern.NONFINITE
    return finding_at(row, FindingKind.ORIGIN, reason, evidence.as_dict(), pattern)


def cause_of_origin(origin: Origin) -> tuple[Cause, str]:
    """The cause of a non-finite value whose operation is known, and a sentence that says so."""
    if origin.cause is not Cause.UNKNOWN or not origin.module_type:
        return origin.cause, origin.reason
    known = cause_of_role(role_of(origin.module, origin.module_type), GradProblem.NONFINITE)
    return (Cause.UNKNOWN, origin.reason) if known is None else (known[0], f"{known[1]} {origin.reason}")

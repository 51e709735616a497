"""The base class of all detectors: they look at one row at a time and report findings, but cannot act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from surefoot.judge.evidence import Evidence
from surefoot.records import Finding, FindingKind, Pattern, Severity, StepMetrics

Findings = Sequence[Finding]
NOTHING: Findings = ()


class Detector:
    """Reports something when it begins, and again only after it has ended.

    It is asked about a row that has one of the signs in `wakes_on`, and about every row while it is `watching`. So an
    update that leaves `watching` off must have left nothing to do on rows without such a sign.
    """

    kind: ClassVar[FindingKind]
    """The class name in snake case; `FindingKind.named(...)`, unless rules about incidents or causes name it."""
    wakes_on: ClassVar[int]
    """Signs of `signals.Sign`."""
    severity: ClassVar[Severity] = Severity.SUSPICIOUS
    """Of its findings, unless one is severe."""
    state_names: ClassVar[tuple[str, ...]] = ()
    """Attributes that are saved: plain numbers, and lists or arrays of them."""
    watching = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        raise NotImplementedError

    def rewound(self) -> None:
        """The run was rewound: forget what was being watched."""

    def state_dict(self) -> dict[str, Any]:
        return {name: _as_list(getattr(self, name)) for name in self.state_names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in (name for name in self.state_names if name in state):  # an older state lacks what was added since
            current = getattr(self, name)
            if isinstance(current, np.ndarray):
                setattr(self, name, np.array(state[name], dtype=current.dtype))
            else:
                setattr(self, name, type(current)(state[name]) if isinstance(current, list | set) else state[name])

    def report(
        self,
        row: StepMetrics,
        detail: str,
        evidence: Evidence | Mapping[str, Any] | None = None,
        pattern: Pattern = Pattern.NONE,
        *,
        severe: bool = False,
    ) -> Findings:
        """The finding of one row; evidence that nothing else reads is a plain dictionary."""
        held = evidence.as_dict() if isinstance(evidence, Evidence) else dict(evidence or {})
        return [finding_at(row, self.kind, detail, held, pattern, Severity.SEVERE if severe else self.severity)]


class WatchingDetector(Detector):
    """A detector that stays awake after it woke up, until an update finds that nothing is under way."""

    def __init__(self) -> None:
        self.watching = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.watching = True


def finding_at(
    row: StepMetrics,
    kind: FindingKind,
    detail: str,
    evidence: dict[str, Any],
    pattern: Pattern = Pattern.NONE,
    severity: Severity = Severity.SUSPICIOUS,
) -> Finding:
    """A finding about this row."""
    return Finding(
        step=row.step,
        attempt=row.attempt,
        time=row.time,
        detector=kind,
        pattern=pattern,
        detail=detail,
        severity=severity,
        evidence=evidence,
    )


def _as_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, list | set) else value

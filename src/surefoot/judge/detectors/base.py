"""The base class of all detectors: they look at one row at a time and report findings, but cannot act."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from surefoot.journal.aliases import DETECTOR_STATE, renamed
from surefoot.records import Finding, Pattern, StepMetrics


class Detector:
    """Reports something when it begins, and again only after it has ended."""

    name: ClassVar[str]
    """The class name in snake case; stands in `Finding.detector`."""
    state_names: ClassVar[tuple[str, ...]] = ()
    """Attributes that are saved: plain numbers, and lists of them."""

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        raise NotImplementedError

    def rewound(self) -> None:
        """The run was rewound: forget what was being watched."""

    def state_dict(self) -> dict[str, Any]:
        return {name: _as_list(getattr(self, name)) for name in self.state_names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = renamed(state, {"_told": "_reported"} | DETECTOR_STATE.get(self.name, {}))
        for name in (name for name in self.state_names if name in state):  # an older state lacks what was added since
            current = getattr(self, name)
            setattr(self, name, type(current)(state[name]) if isinstance(current, list | set) else state[name])

    def report(
        self, row: StepMetrics, detail: str, pattern: Pattern = Pattern.NONE, *, severe: bool = False, **evidence: Any
    ) -> list[Finding]:
        """The finding of one row, as a list."""
        return [
            Finding(
                step=row.step,
                attempt=row.attempt,
                time=row.time,
                detector=self.name,
                pattern=pattern,
                detail=detail,
                severe=severe,
                evidence=evidence,
            )
        ]


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | set) else value

"""What all detectors have in common: they look at one row at a time, can tell, and cannot act."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from surefoot.records import Finding, Pattern, StepMetrics


class Detector:
    """Speaks when something begins, and again only after it has ended."""

    name: ClassVar[str]
    kept: ClassVar[tuple[str, ...]] = ()
    """Attributes that are its state: plain numbers, and lists of them."""

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        raise NotImplementedError

    def rewound(self) -> None:
        """The run went back: what was being watched has not happened."""

    def state_dict(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in (name for name in self.kept if name in state):  # an older state lacks what was added since
            held = getattr(self, name)
            setattr(self, name, type(held)(state[name]) if isinstance(held, list | set) else state[name])

    def found(
        self, row: StepMetrics, detail: str, pattern: Pattern = Pattern.NONE, *, severe: bool = False, **evidence: Any
    ) -> list[Finding]:
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


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | set) else value

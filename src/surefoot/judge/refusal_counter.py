"""How many updates in a row were not applied."""

from __future__ import annotations

from typing import Any

from surefoot.judge.signals import REFUSED
from surefoot.judge.thresholds import BASELINE_ROWS
from surefoot.records import StepMetrics, Verdict


class RefusalCounter:
    """Counts refused updates and overflows since one was applied.

    An update counts once, however many optimizers took part in it.
    """

    def __init__(self) -> None:
        self.refused = 0
        """Refused updates in a row."""
        self.overflows = 0
        """Overflows of the loss scale in a row."""
        self.attempt = -1
        """The last attempt that was counted."""

    def update(self, row: StepMetrics) -> None:
        if row.applied:
            self.refused = self.overflows = 0
        if row.attempt != self.attempt:
            if not row.applied:
                self.refused += row.verdict in REFUSED
                self.overflows += row.verdict is Verdict.OVERFLOW
            self.attempt = row.attempt

    @property
    def old_news(self) -> bool:
        """Beyond 64 refusals in a row, only the 128th, the 256th and so on are reported."""
        return self.refused > BASELINE_ROWS and self.refused & (self.refused - 1) != 0

    def state_dict(self) -> dict[str, Any]:
        return {"refused": self.refused, "overflows": self.overflows, "attempt": self.attempt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.refused, self.overflows, self.attempt = state["refused"], state["overflows"], state["attempt"]

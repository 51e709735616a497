"""What came of a run: for a person, for a table of several, for a program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.train import exits
from surefoot.train.figures import span


@dataclass(slots=True)
class Ended:
    """What came of a run."""

    name: str
    run_dir: Path
    code: int = exits.FAILED
    why: str = ""
    """In words, when it did not end well."""
    step: int = 0
    refused: int = 0
    """Updates, of these, that changed nothing."""
    loss: float | None = None
    held_out: float | None = None
    seconds: float = 0.0
    first: bool = True
    """Whether this process speaks for all."""
    unreadable: int = 0
    """Samples that were passed over."""
    shown: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "run_dir": str(self.run_dir),
            "code": self.code,
            "ended": exits.explain(self.code),
            "why": self.why,
            "step": self.step,
            "refused": self.refused,
            "unreadable": self.unreadable,
            "loss": _finite(self.loss),
            "held_out": _finite(self.held_out),
            "seconds": self.seconds,
        }

    def as_row(self) -> tuple[str, ...]:
        """For a table of several runs."""
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (self.loss, self.held_out))
        return self.name, f"{self.step:,}", *losses, span(self.seconds), self.why or exits.explain(self.code)

    def summary(self) -> dict[str, str]:
        """For the end of a run that went well."""
        refused = f", {self.refused:,} of them refused" if self.refused else ""
        told = {"done": f"{self.step:,} updates{refused}"}
        if self.unreadable:
            told["unreadable"] = f"{self.unreadable:,} samples, which were passed over"
        if self.loss is not None:
            mean = f"{self.loss:.4f}, the mean of the last updates"
            told["loss"] = "not finite in any of the last updates" if math.isnan(self.loss) else mean
        if self.held_out is not None:
            told["held out"] = f"{self.held_out:.4f}"
        return told | self.shown


def _finite(value: float | None) -> float | None:
    """JSON has no word for NaN."""
    return value if value is not None and math.isfinite(value) else None

"""End the run, with the reason in words."""

from __future__ import annotations

from dataclasses import dataclass


class TrainingStopped(RuntimeError):
    """Raised out of `optimizer.step()` when going on would do no good; the message gives the reason in words."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the run at the end of a step."""

    reason: str

    def apply(self) -> None:
        raise TrainingStopped(f"surefoot stopped the run: {self.reason}")

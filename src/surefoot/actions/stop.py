"""End the run, with the reason in words."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.actions.action_context import ActionContext, CannotAct
from surefoot.actions.rewind import Rewind


class TrainingStopped(RuntimeError):
    """Raised out of `optimizer.step()` when going on would do no good; the message gives the reason in words."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the run; where trouble has reached the weights, `before` says since when, and they go back first."""

    reason: str
    before: int = -1

    def apply(self, run: ActionContext) -> None:
        back = ""
        if self.before >= 0:
            try:
                back = f" The model is back at step {Rewind(self.before).apply(run).step}."
            except CannotAct as why:
                back = f" The model is as the run left it: {why}."
        reason = self.reason if self.reason.endswith((".", "!", "?")) or not back else f"{self.reason}."
        raise TrainingStopped(f"surefoot stopped the run: {reason}{back}")

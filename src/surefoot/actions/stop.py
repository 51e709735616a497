"""Stops a run and gives the reason."""

from __future__ import annotations

from typing import NoReturn

from surefoot.actions.action_context import ActionContext, CannotAct
from surefoot.actions.rewind import rewind


class TrainingStopped(RuntimeError):
    """Raised out of `optimizer.step()` when training on would do no good; the message gives the reason."""


def stop(run: ActionContext, reason: str, *, before: int = -1) -> NoReturn:
    """Raise `TrainingStopped`; first rewind to before the attempt `before`, if it is not negative."""
    outcome = ""
    if before >= 0:
        try:
            outcome = f" The model is back at step {rewind(run, before=before).step}."
        except CannotAct as error:
            outcome = f" The model is as the run left it: {error}."
    reason = reason if reason.endswith((".", "!", "?")) or not outcome else f"{reason}."
    raise TrainingStopped(f"surefoot stopped the run: {reason}{outcome}")

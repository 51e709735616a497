"""Carries out a decision."""

from __future__ import annotations

import torch

from surefoot.actions.action_context import ActionContext, CannotAct
from surefoot.actions.rewind import rewind
from surefoot.actions.stop import stop
from surefoot.records import Action, Decision


def apply(decision: Decision, run: ActionContext) -> str:
    """Do all of a decision and describe it, or raise `CannotAct`; raises `TrainingStopped` for a stop."""
    if decision.action is Action.STOP:
        stop(run, decision.reason, before=decision.max_attempt)
    overrides = decision.overrides
    unsupported = None if overrides is None else run.overrides.unsupported_reason(overrides)
    if unsupported is not None:
        raise CannotAct(unsupported)
    done: list[str] = []
    if decision.action is Action.REWIND:
        state = rewind(run, before=decision.max_attempt, onset_known=decision.onset_known)
        done.append(f"back to step {state.step}")
    if decision.reset_optimizer:
        run.reset_optimizers()
    if decision.loss_scale > 0:
        set_loss_scale(run, decision.loss_scale)
    if overrides is not None:
        run.overrides.set(overrides, decision.optimizers)
    return ", ".join([*done, decision.remedy] if decision.remedy else done)


def set_loss_scale(run: ActionContext, scale: float) -> None:
    """Set the GradScaler's scale in place and restart its growth interval; if it is too high, the scaler lowers it."""
    scaler = run.scaler
    if scaler is None or not scaler.is_enabled() or scaler._scale is None:
        raise CannotAct("there is no loss scale to set: pass your GradScaler as scaler=")
    with torch.no_grad():
        scaler._scale.fill_(scale)
        scaler._growth_tracker.zero_()

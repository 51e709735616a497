"""From a decision to what is done about it."""

from __future__ import annotations

from surefoot.actions.action_context import ActionContext, CannotAct
from surefoot.actions.rescale import Rescale
from surefoot.actions.reset import Reset
from surefoot.actions.rewind import Rewind
from surefoot.actions.stop import Stop
from surefoot.records import Action, Decision


def apply(decision: Decision, run: ActionContext) -> str:
    """Do all that was decided, or raise `CannotAct` and do nothing; says in words what was done."""
    if decision.action is Action.STOP:
        Stop(decision.reason, decision.max_attempt).apply(run)
    asked = decision.overrides
    objection = None if asked is None else run.reins.objection(asked)
    if objection is not None:
        raise CannotAct(objection)
    done: list[str] = []
    if decision.action is Action.REWIND:
        done.append(f"back to step {Rewind(decision.max_attempt, decision.onset_known).apply(run).step}")
    if decision.reset_optimizer:
        Reset().apply(run)
    if decision.loss_scale > 0:
        Rescale(decision.loss_scale).apply(run)
    if asked is not None:
        run.reins.set(asked, decision.optimizers)
    return ", ".join([*done, decision.remedy] if decision.remedy else done)

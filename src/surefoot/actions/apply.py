"""From a decision to what is done about it."""

from __future__ import annotations

from surefoot.actions.action_context import CannotAct, Run
from surefoot.actions.rescale import Rescale
from surefoot.actions.reset import Reset
from surefoot.actions.rewind import Rewind
from surefoot.actions.stop import Stop
from surefoot.records import Action, Decision


def carry_out(decision: Decision, run: Run) -> str:
    """Do all that was decided, or raise `CannotAct` and do nothing; says in words what was done."""
    if decision.action is Action.STOP:
        Stop(decision.reason, decision.before).apply(run)
    asked = decision.restraint
    objection = None if asked is None else run.reins.objection(asked)
    if objection is not None:
        raise CannotAct(objection)
    done: list[str] = []
    if decision.action is Action.REWIND:
        done.append(f"back to step {Rewind(decision.before, decision.dated).apply(run).step}")
    if decision.reset:
        Reset().apply(run)
    if decision.scale > 0:
        Rescale(decision.scale).apply(run)
    if asked is not None:
        run.reins.set(asked, decision.optimizers)
    return ", ".join([*done, decision.rung] if decision.rung else done)

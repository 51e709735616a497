"""Forget what the optimizers have gathered."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.actions.action_context import ActionContext


@dataclass(frozen=True, slots=True)
class Reset:
    """Empties the optimizers' state: the next step is as a first one."""

    def apply(self, run: ActionContext) -> None:
        run.empty()

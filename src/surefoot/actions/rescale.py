"""Give the loss scale back a value that worked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.actions.action_context import ActionContext, CannotAct


@dataclass(frozen=True, slots=True)
class Rescale:
    """Sets the scale in place and begins to count anew; should it be too high, the scaler itself lowers it again."""

    scale: float

    def apply(self, run: ActionContext) -> None:
        scaler = run.scaler
        if scaler is None or not scaler.is_enabled() or scaler._scale is None:
            raise CannotAct("there is no loss scale to be set: pass your GradScaler as scaler=")
        with torch.no_grad():
            scaler._scale.fill_(self.scale)
            scaler._growth_tracker.zero_()

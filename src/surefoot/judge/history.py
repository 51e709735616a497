"""The last losses and gradient norms, always at hand."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from surefoot.judge.policy import AGAIN, KEPT


class History:
    """The last 100 losses and norms of one optimizer, with the first and second difference of the loss."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=KEPT)
        self.norms: deque[float] = deque(maxlen=KEPT)
        self.clipped: deque[bool] = deque(maxlen=KEPT)
        self.replica_norm = math.nan
        """Norm of the replicated weights when they were last found equal on all ranks."""
        self.unequal: deque[bool] = deque(maxlen=AGAIN)
        """Of the last updates that landed: whether the ranks applied different gradients."""
        self.others: dict[int, History] = {}
        """Those of the other optimizers, by their number: losses of two that step in turn are two series."""

    @property
    def ranks_unequal(self) -> bool:
        """The ranks apply different gradients, in one of the optimizers: once or twice may be a fault on the way."""
        return any(list(history.unequal) == [True] * AGAIN for history in (self, *self.others.values()))

    def of(self, optimizer: int) -> History:
        """The history of one optimizer of the run; this is the one of the first."""
        return self if optimizer == 0 else self.others.setdefault(optimizer, History())

    def clip_share(self, factor: float) -> float:
        """Take in the factor of one clipped update and return the share of the last 100 that were made smaller."""
        self.clipped.append(factor < 1.0)
        return sum(self.clipped) / len(self.clipped)

    def add(self, loss: float, norm: float) -> tuple[float, float]:
        """Take in one update and return the loss's first and second difference."""
        d1 = loss - self.losses[-1] if self.losses else math.nan
        d2 = d1 - (self.losses[-1] - self.losses[-2]) if len(self.losses) > 1 else math.nan
        self.losses.append(loss)
        self.norms.append(norm)
        return d1, d2

    def state_dict(self) -> dict[str, Any]:
        held: dict[str, Any] = {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "clipped": list(self.clipped),
        }
        return held | ({"others": {k: h.state_dict() for k, h in self.others.items()}} if self.others else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=KEPT)
        self.norms = deque(state["norms"], maxlen=KEPT)
        self.clipped = deque(state["clipped"], maxlen=KEPT)
        self.others = {}
        for k, held in state.get("others", {}).items():
            self.of(int(k)).load_state_dict(held)

"""The last losses and gradient norms of a run."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from surefoot.judge.thresholds import HISTORY_ROWS, REPEAT_COUNT


class History:
    """The last 100 losses and norms of one optimizer, with the first and second difference of the loss."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=HISTORY_ROWS)
        self.norms: deque[float] = deque(maxlen=HISTORY_ROWS)
        self.clipped: deque[bool] = deque(maxlen=HISTORY_ROWS)
        self.replica_norm = math.nan
        """Norm of the replicated weights when they were last found equal on all ranks."""
        self.unequal: deque[bool] = deque(maxlen=REPEAT_COUNT)
        """For each of the last applied updates: whether the ranks applied different gradients."""
        self.others: dict[int, History] = {}
        """Histories of the other optimizers, by number: losses of two that step in turn are two series."""

    @property
    def ranks_unequal(self) -> bool:
        """The ranks keep applying different gradients, in one of the optimizers; once or twice may be a fault."""
        return any(list(history.unequal) == [True] * REPEAT_COUNT for history in (self, *self.others.values()))

    def of(self, optimizer: int) -> History:
        """The history of one optimizer; this one is that of the first."""
        return self if optimizer == 0 else self.others.setdefault(optimizer, History())

    def clip_fraction(self, factor: float) -> float:
        """Add an update's clip factor and return the fraction of the last 100 updates that were clipped."""
        self.clipped.append(factor < 1.0)
        return sum(self.clipped) / len(self.clipped)

    def add(self, loss: float, norm: float) -> tuple[float, float]:
        """Add one update and return the loss's first and second difference."""
        d1 = loss - self.losses[-1] if self.losses else math.nan
        d2 = d1 - (self.losses[-1] - self.losses[-2]) if len(self.losses) > 1 else math.nan
        self.losses.append(loss)
        self.norms.append(norm)
        return d1, d2

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "clipped": list(self.clipped),
        }
        if self.others:
            state["others"] = {k: history.state_dict() for k, history in self.others.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=HISTORY_ROWS)
        self.norms = deque(state["norms"], maxlen=HISTORY_ROWS)
        self.clipped = deque(state["clipped"], maxlen=HISTORY_ROWS)
        self.others = {}
        for k, history in state.get("others", {}).items():
            self.of(int(k)).load_state_dict(history)

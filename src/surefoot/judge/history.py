"""The last losses and gradient norms, always at hand."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from surefoot.judge.policy import KEPT


class History:
    """The last 100 losses and norms, with the first and second difference of the loss."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=KEPT)
        self.norms: deque[float] = deque(maxlen=KEPT)
        self.clipped: deque[bool] = deque(maxlen=KEPT)
        self.differences = (math.nan, math.nan)
        """Those of the last update."""

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
        self.differences = (d1, d2)
        return d1, d2

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "norms": list(self.norms), "clipped": list(self.clipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=KEPT)
        self.norms = deque(state["norms"], maxlen=KEPT)
        self.clipped = deque(state["clipped"], maxlen=KEPT)

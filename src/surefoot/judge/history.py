"""The last losses and gradient norms, always at hand."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

KEPT = 100


class History:
    """The last 100 losses and norms, with the first and second difference of the loss."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=KEPT)
        self.norms: deque[float] = deque(maxlen=KEPT)
        self.clipped: deque[bool] = deque(maxlen=KEPT)
        self.differences = (math.nan, math.nan)
        """Those of the last update."""

    def share_with(self, factor: float) -> float:
        """What `clip_share` would return, with nothing taken in."""
        oldest = self.clipped[0] if len(self.clipped) == KEPT else False
        return (sum(self.clipped) - oldest + (factor < 1.0)) / min(len(self.clipped) + 1, KEPT)

    def clip_share(self, factor: float) -> float:
        """Take in the factor of one clipped update and return the share of the last 100 that were made smaller."""
        share = self.share_with(factor)
        self.clipped.append(factor < 1.0)
        return share

    def differences_to(self, loss: float) -> tuple[float, float]:
        """What `add` would return, with nothing taken in."""
        d1 = loss - self.losses[-1] if self.losses else math.nan
        d2 = d1 - (self.losses[-1] - self.losses[-2]) if len(self.losses) > 1 else math.nan
        return d1, d2

    def add(self, loss: float, norm: float) -> tuple[float, float]:
        """Take in one update and return the loss's first and second difference."""
        self.differences = self.differences_to(loss)
        self.losses.append(loss)
        self.norms.append(norm)
        return self.differences

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "norms": list(self.norms), "clipped": list(self.clipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=KEPT)
        self.norms = deque(state["norms"], maxlen=KEPT)
        self.clipped = deque(state["clipped"], maxlen=KEPT)

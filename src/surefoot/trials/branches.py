"""The branches of a trial, and what came of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class BranchId(StrEnum):
    """What a branch does; the values are written to the journal."""

    NOTHING = "nothing"
    """The run as it is now."""
    REWIND = "rewind"
    """The snapshot, and nothing trained since."""
    REPLAY = "replay"
    """The steps since the snapshot again, as they were."""
    SKIP = "skip"
    """The same without the batches that stand out."""
    OLD_SETTINGS = "old_settings"
    """The same with lr and momentum of the time of the snapshot."""
    CLIP = "clip"
    """The same with gradients clipped at their usual norm."""
    FLOAT32 = "float32"
    """The same in float32."""
    RESTART = "restart"
    """The initial state, and the kept steps from there as they were."""
    RESTART_CLIP = "restart_clip"
    """The same with gradients clipped at the norm they had at first."""
    RESTART_LR_03 = "restart_lr_x0.3"
    """The same with this factor on the learning rate."""
    RESTART_LR_01 = "restart_lr_x0.1"
    RESTART_LR_003 = "restart_lr_x0.03"
    RESTART_LR_001 = "restart_lr_x0.01"
    RESTART_LR_0003 = "restart_lr_x0.003"


@dataclass(frozen=True, slots=True)
class BranchResult:
    """What came of one branch."""

    branch: BranchId
    probe_losses: tuple[float, ...]
    """The loss of each probe batch at its end."""
    losses: dict[int, float] = field(default_factory=dict)
    """Loss of each attempt that was taken again."""
    norms: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def probe_loss(self) -> float:
        return statistics.fmean(self.probe_losses) if self.probe_losses else math.nan

    def as_json(self) -> dict[str, Any]:
        return {
            "branch": self.branch.value,
            "probe_loss": self.probe_loss,
            "steps": len(self.losses),
            "seconds": round(self.seconds, 4),
        }


MARGIN_ERRORS = 3.0
"""Standard errors of the paired differences by which a branch must be better."""
MARGIN_FRACTION = 0.01
"""The same as a fraction of the probe loss."""


def is_better(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the first are lower than the second by more than the noise of the probes: paired, batch by batch."""
    return gain(losses, others) > 1.0


def gain(losses: Sequence[float], others: Sequence[float]) -> float:
    """By how many margins the first losses are lower than the second."""
    if not all(map(math.isfinite, losses)):
        return -math.inf
    if not all(map(math.isfinite, others)):
        return math.inf
    differences = [other - loss for loss, other in zip(losses, others, strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    error = spread / math.sqrt(len(differences))
    margin = max(MARGIN_ERRORS * error, MARGIN_FRACTION * abs(statistics.fmean(others)), 1e-12)
    return statistics.fmean(differences) / margin

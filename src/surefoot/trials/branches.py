"""The branches of a trial, and what came of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from surefoot.records import Cause, RemedyId


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
    LR_03 = "lr_x0.3"
    """The same with this factor on the learning rate."""
    LR_01 = "lr_x0.1"
    FRESH_OPTIMIZER = "fresh_optimizer"
    """The same with the optimizer's state as before its first step."""
    OLD_BATCHES = "old_batches"
    """The same with batches from before the trouble in place of those since."""
    OPTIMIZER_NOW = "optimizer_now"
    """The steps since the run differed from its replay, with the weights of the snapshot and the optimizer of now."""
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
class Branch:
    """What is different in one branch."""

    id: BranchId
    text: str
    """How its steps are trained, in words; it follows "12 updates since step 140 trained again"."""
    lr_factor: float = 1.0
    clip: bool = False
    """Gradients are clipped at their usual norm."""
    skip: bool = False
    """Batches that stand out are left out."""
    old_settings: bool = False
    """Learning rate and momentum are those of the time of the snapshot."""
    float32: bool = False
    fresh_optimizer: bool = False
    cause: Cause = Cause.UNKNOWN
    """What is to blame if only this helps, and nothing else tells."""


REPLAY = Branch(BranchId.REPLAY, "as they were, without what was changed from outside")
SKIP = Branch(BranchId.SKIP, "without the batches that stand out", skip=True)
OLD_SETTINGS = Branch(BranchId.OLD_SETTINGS, "with lr and momentum as they were before", old_settings=True)
CLIP = Branch(BranchId.CLIP, "with gradients clipped at their usual norm", clip=True, cause=Cause.EXPLODING_GRADIENT)
FLOAT32 = Branch(BranchId.FLOAT32, "in float32", float32=True)
LR_03 = Branch(BranchId.LR_03, "with 0.3 times the learning rate", lr_factor=0.3, cause=Cause.LEARNING_RATE)
LR_01 = Branch(BranchId.LR_01, "with 0.1 times the learning rate", lr_factor=0.1, cause=Cause.LEARNING_RATE)
FRESH_OPTIMIZER = Branch(
    BranchId.FRESH_OPTIMIZER, "with a fresh optimizer", fresh_optimizer=True, cause=Cause.OPTIMIZER_STATE
)
OLD_BATCHES = Branch(BranchId.OLD_BATCHES, "on batches from before the trouble")
OPTIMIZER_NOW = Branch(
    BranchId.OPTIMIZER_NOW, "with the weights of then and the optimizer of now", cause=Cause.OPTIMIZER_STATE
)
LAST_BRANCHES = (LR_03, LR_01, FRESH_OPTIMIZER)
"""Tried where a run was harmed and nothing else helps."""
BRANCHES = {b.id: b for b in (REPLAY, SKIP, OLD_SETTINGS, CLIP, FLOAT32, *LAST_BRANCHES, OLD_BATCHES, OPTIMIZER_NOW)}

BRANCHES_OF_REMEDIES = {
    RemedyId.CLIP: BranchId.CLIP,
    RemedyId.LOWER_LR: BranchId.LR_03,
    RemedyId.FRESH_OPTIMIZER: BranchId.FRESH_OPTIMIZER,
    RemedyId.FLOAT32: BranchId.FLOAT32,
    RemedyId.FLOAT32_REWIND: BranchId.FLOAT32,
    RemedyId.CAP: BranchId.OLD_SETTINGS,
    RemedyId.WAIT_OUT: BranchId.SKIP,
}
"""The branch that is most like a remedy of the rules."""


def branch_of_remedy(name: str) -> BranchId | None:
    """The branch of a trial that does what a branch or a remedy of this name did; None if there is none."""
    branches = {branch.value: branch for branch in BRANCHES}
    by_remedy = {remedy.value: branch for remedy, branch in BRANCHES_OF_REMEDIES.items()}
    return branches.get(name, by_remedy.get(name))


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


def in_order(branches: Sequence[Branch], first: BranchId | None) -> list[Branch]:
    """The branches with one of them moved to the front, or one of the last branches put there.

    Each branch begins from the same state, so what comes of it does not depend on its place.
    """
    front = [branch for branch in (*branches, *LAST_BRANCHES) if branch.id is first][:1]
    return front + [branch for branch in branches if branch not in front]

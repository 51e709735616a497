"""What findings rest on, typed: a detector fills it in, and severity, causes and remedies read it.

A finding carries it as plain values, as the journal and a saved incident hold them; `Evidence.read` reads it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

from surefoot.records import Cause, Finding
from surefoot.records import FindingKind as Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Base of all evidence; field names are those in the journal, where fields with their default are left out."""

    kinds: ClassVar[tuple[Kind, ...]]

    def as_dict(self) -> dict[str, Any]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @classmethod
    def read(cls, finding: Finding) -> Self | None:
        """The evidence of a finding; None if it is of another kind."""
        if finding.detector not in cls.kinds:
            return None
        held = finding.evidence
        if any(f.name not in held and f.default is MISSING for f in fields(cls)):
            return None
        return cls(**{f.name: held[f.name] for f in fields(cls) if f.name in held})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossEvidence(Evidence):
    """Of a loss that jumps, grows or swings: its value at that row."""

    kinds = (Kind.JUMP, Kind.GROWTH, Kind.OSCILLATION)
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpEvidence(LossEvidence):
    kinds = (Kind.JUMP,)
    norm: float
    deviations: float
    norm_ratio: float
    """Log of the norm over the largest recent one."""
    huge: bool
    """The norm jumped furthest, and the update was applied."""
    times: int
    """Large norm jumps within 64 rows of each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthEvidence(LossEvidence):
    kinds = (Kind.GROWTH,)
    norm: float
    rise: float
    of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwingEvidence(LossEvidence):
    kinds = (Kind.OSCILLATION,)
    deviations: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelEvidence(Evidence):
    """A loss that stays higher."""

    kinds = (Kind.LOSS_LEVEL,)
    level: float
    normal: float
    deviations: float
    of_start: float
    slowly: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyEvidence(Evidence):
    """Of a run that went wrong before it was proven to learn."""

    kinds = (Kind.EARLY_LEARNING,)
    start: float
    """The very first loss."""
    best: float
    """The best level since; infinite where there is none yet."""
    violent: bool
    """Loss or gradients changed far more than learning changes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescaledEvidence(Evidence):
    kinds = (Kind.LOSS_RESCALED,)
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRaised(Evidence):
    kinds = (Kind.HYPERPARAM_CHANGE,)
    lr: float
    times: float
    """How many times its usual value."""
    at_once: float
    """How many times the learning rate of the row before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrDropped(Evidence):
    kinds = (Kind.HYPERPARAM_CHANGE,)
    lr: float
    before: float
    early: bool
    """Before the run had learnt anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumRaised(Evidence):
    kinds = (Kind.HYPERPARAM_CHANGE,)
    momentum: float
    before: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippingEvidence(Evidence):
    """The loop's own clipping changed."""

    kinds = (Kind.CLIPPING_CHANGED,)
    usual: float
    handed: float
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersEvidence(Evidence):
    """Layers whose gradients explode, vanish or are dead."""

    kinds = (Kind.EXPLODING_GRADS, Kind.VANISHING_GRADS, Kind.DEAD_UNITS)
    layers: list[str]
    share: float
    """The fraction of all tensors they are."""
    norm: float | None = None
    zeros: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightJumpEvidence(Evidence):
    kinds = (Kind.WEIGHT_JUMP,)
    times: float
    well: int
    """The attempt of the last weight check before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallUpdates(Evidence):
    kinds = (Kind.FROZEN_WEIGHTS,)
    update_ratio: float
    smaller: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedUpdates(Evidence):
    kinds = (Kind.FROZEN_WEIGHTS,)
    unchanged_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StillTensors(Evidence):
    """Tensors that no optimizer holds, or that get no gradient."""

    kinds = (Kind.FROZEN_WEIGHTS,)
    layers: list[str]
    tensors: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasEvidence(Evidence):
    """Ranks that hold different weights."""

    kinds = (Kind.REPLICAS,)
    ranks: float
    culprit_rank: int
    well: int
    """The attempt at which all were equal."""
    equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NovelBatch(Evidence):
    kinds = (Kind.INPUT_SHIFT,)
    mean: float
    spread: float
    usual: float
    """The usual standard deviation."""
    slowly: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDrift(Evidence):
    kinds = (Kind.INPUT_SHIFT,)
    moved: float
    spread: float
    slowly: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenBatch(Evidence):
    """A batch that holds non-finite values."""

    kinds = (Kind.INPUT_SHIFT,)
    top: float
    broken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFell(Evidence):
    kinds = (Kind.LOSS_SCALE,)
    scale: float
    usual: float
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRiseEvidence(Evidence):
    kinds = (Kind.EVAL_RISE,)
    eval_loss: float
    best: float
    apart: bool
    """The training loss keeps falling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionEvidence(Evidence):
    """An eval loss far above its best."""

    kinds = (Kind.EVAL_REGRESSION,)
    raised: bool
    """The learning rate was raised before."""
    twice: bool
    """Two evaluations in a row were far above the best."""
    lost: bool
    """It is above the very first one."""
    eval_loss: float
    best: float
    well: int
    """The attempt and learning rate at which it was last healthy."""
    rate: float
    lately: float
    """The median of the last training losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEvidence(Evidence):
    """Steps that are slow, or a device that is idle."""

    kinds = (Kind.SLOW_STEPS, Kind.IDLE_DEVICE)
    data: bool
    """They wait for data."""
    seconds: float | None = None
    usual: float | None = None
    bottleneck: str = ""
    """What else they wait for: launches or saving; empty where that does not show."""
    wait: float | None = None
    utilisation: float | None = None
    data_wait_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginEvidence(Evidence):
    """The module in which a non-finite value first appeared."""

    kinds = (Kind.ORIGIN,)
    module: str
    kind: str
    inputs: bool
    weights: bool
    cause: Cause
    origin: Mapping[str, Any] | None = None
    """Operation, line of code, values and samples, as `surefoot.locate` names them; None where only the module is
    known."""

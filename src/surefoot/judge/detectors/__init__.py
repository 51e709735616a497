"""The table of all detectors: a new one is a class in the file of its topic and a line in `DETECTORS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.judge.detectors.base import Detector
from surefoot.judge.detectors.data import InputShift, RepeatedBatches, SlowSteps, TinyBatches
from surefoot.judge.detectors.evaluation import EvalRegression, EvalRise
from surefoot.judge.detectors.gradients import (
    DeadUnits,
    ExplodingGrads,
    LargeInitialGrads,
    LossRescaled,
    StaleGrads,
    VanishingGrads,
)
from surefoot.judge.detectors.hyperparams import Clipping, ClippingChanged, HyperparamChange
from surefoot.judge.detectors.loss import Growth, Jump, LossLevel, Oscillation, PeriodicSpikes, Plateau
from surefoot.judge.detectors.system import IdleDevice, LossScale, MemoryGrowth
from surefoot.judge.detectors.vetoes import NonFinite, NormOutlier
from surefoot.judge.detectors.weights import FrozenWeights, Replicas, WeightJump
from surefoot.judge.signals import Signals
from surefoot.judge.thresholds import Thresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What detectors need to know about the model and its run."""

    names: Sequence[str] = ()
    """Of all tensors."""
    owned: int | None = None
    """The first so many tensors are held by an optimizer; None for all."""
    adaptive: bool = True
    """The optimizer divides by the size of past gradients."""
    single_rank: bool = True
    has_batch_norm: bool = False
    buffers: Sequence[str] = ()
    """Names of the buffers that are checked for NaN."""


@dataclass(frozen=True, slots=True)
class DetectorInputs:
    """What detectors are made from."""

    signals: Signals
    model: ModelFacts
    loss_rescaled: LossRescaled

    @property
    def thresholds(self) -> Thresholds:
        return self.signals.thresholds


DETECTORS: tuple[Callable[[DetectorInputs], Detector], ...] = (
    lambda made: made.loss_rescaled,
    lambda made: InputShift(made.thresholds),
    lambda made: TinyBatches(made.signals, has_batch_norm=made.model.has_batch_norm),
    lambda made: WeightJump(),
    lambda made: StaleGrads(),
    lambda made: ClippingChanged(made.signals),
    lambda made: HyperparamChange(made.signals),
    lambda made: LossScale(made.thresholds),
    lambda made: FrozenWeights(made.model.names, made.model.owned, made.signals, adaptive=made.model.adaptive),
    lambda made: Jump(made.signals),
    lambda made: LossLevel(made.signals, made.loss_rescaled),
    lambda made: Growth(made.signals),
    lambda made: Oscillation(made.signals),
    lambda made: ExplodingGrads(made.signals, made.model.names),
    lambda made: VanishingGrads(made.signals, made.model.names),
    lambda made: DeadUnits(made.signals, made.model.names),
    lambda made: PeriodicSpikes(made.signals),
    lambda made: RepeatedBatches(made.thresholds),
    lambda made: LargeInitialGrads(made.thresholds),
    lambda made: Plateau(made.signals),
    lambda made: EvalRise(made.signals),
    lambda made: EvalRegression(made.signals, single_rank=made.model.single_rank),
    lambda made: Clipping(made.thresholds),
    lambda made: SlowSteps(made.thresholds),
    lambda made: MemoryGrowth(made.thresholds),
    lambda made: IdleDevice(made.thresholds),
    lambda made: Replicas(),
)
"""How each detector is made, in the order in which they report."""


class Detectors:
    """The detectors of one judge; those that others ask have a name."""

    def __init__(self, signals: Signals, model: ModelFacts) -> None:
        self.loss_rescaled = LossRescaled(signals)
        inputs = DetectorInputs(signals, model, self.loss_rescaled)
        self.all: Sequence[Detector] = [make(inputs) for make in DETECTORS]
        self.of_vetoes: Sequence[Detector] = (NonFinite(model.buffers), NormOutlier(signals))
        """They look at rows as they were measured, even where another number than the loss is judged."""
        self.input_shift = next(detector for detector in self.all if isinstance(detector, InputShift))
        self.replicas = next(detector for detector in self.all if isinstance(detector, Replicas))

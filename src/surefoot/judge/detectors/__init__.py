"""The table of all detectors: a new one is a class in the file of its topic, a line here, and a `FindingKind`."""

from __future__ import annotations

from collections.abc import Sequence
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


class Detectors:
    """All detectors; those that others ask have a name."""

    def __init__(self, signals: Signals, model: ModelFacts) -> None:
        thresholds, names = signals.thresholds, model.names
        self.loss_rescaled = LossRescaled(signals)
        self.input_shift = InputShift(thresholds)
        self.replicas = Replicas()
        self.of_vetoes: Sequence[Detector] = (NonFinite(model.buffers), NormOutlier(signals))
        """They look at rows as they were measured, even where another number than the loss is judged."""
        self.all: Sequence[Detector] = (
            self.loss_rescaled,
            self.input_shift,
            TinyBatches(signals, has_batch_norm=model.has_batch_norm),
            WeightJump(),
            StaleGrads(),
            ClippingChanged(signals),
            HyperparamChange(signals),
            LossScale(thresholds),
            FrozenWeights(names, model.owned, signals, adaptive=model.adaptive),
            Jump(signals),
            LossLevel(signals, self.loss_rescaled),
            Growth(signals),
            Oscillation(signals),
            ExplodingGrads(signals, names),
            VanishingGrads(signals, names),
            DeadUnits(signals, names),
            PeriodicSpikes(signals),
            RepeatedBatches(thresholds),
            LargeInitialGrads(thresholds),
            Plateau(signals),
            EvalRise(signals),
            EvalRegression(signals, single_rank=model.single_rank),
            Clipping(thresholds),
            SlowSteps(thresholds),
            MemoryGrowth(thresholds),
            IdleDevice(thresholds),
            self.replicas,
        )
        """In the order in which they report."""

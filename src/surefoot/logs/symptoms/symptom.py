"""The figures that decide what is a sign and what is noise, in one place; `surefoot bench logs` tries others. // What a sign says, and the course as all of them look at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.run_curves import Floats, RunCurves, Series
from surefoot.logs.symptoms.loss_curve import LossCurve, loss_curve
from surefoot.records import Cause, Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class SymptomThresholds:
    """How much it takes; levels and rises are logarithms, so 0.1 is about 10 %."""

    blowup_rise: float = 0.7
    """Rise of the loss above its lowest level from which it has left its course: it has doubled."""
    rise_to_noise: float = 2.5
    """How many times the noise that rise has to be."""
    slow_rise: float = 0.1
    """Rise of the loss above its lowest level that is worth a word."""
    spike_to_noise: float = 10.0
    """How many times the noise a peak stands above the level on both sides."""
    overfit_rise: float = 0.15
    """Rise of the evaluation loss above its best, below which it may be called the same."""
    min_fall: float = 0.05
    """Fall of the loss from the first to the last level, below which nothing was learnt."""


DEFAULT_THRESHOLDS = SymptomThresholds()


LOG_2 = float(np.log(2))
"""A level that has doubled, on the scale of `levels`."""
MIN_SIGMAS = 4.0
"""How many times its own spread a change of level has to be, not to be chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """Trouble that was seen."""

    verdict: RunHealth
    pattern: Pattern
    sentence: str
    onset: float | None
    causes: tuple[tuple[Cause, float], ...] = ()
    """With the confidence that the sign alone gives."""
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    """What to do about just this, before what the causes advise."""


@dataclass(frozen=True)
class RunView:
    """A course with what several signs need of it, worked out once."""

    curves: RunCurves
    settings: Mapping[str, float | str] = field(default_factory=dict)
    thresholds: SymptomThresholds = DEFAULT_THRESHOLDS

    @cached_property
    def loss(self) -> LossCurve | None:
        return loss_curve(self.curves.loss)

    @cached_property
    def eval_loss(self) -> LossCurve | None:
        return loss_curve(self.curves.eval_loss)

    @cached_property
    def grad_norm(self) -> LossCurve | None:
        """The gradient norm, unless it was logged as 0 because nobody measured it."""
        values = self.curves.grad_norm.values
        return loss_curve(self.curves.grad_norm) if len(values) and np.any(values != 0) else None

    @property
    def adversarial(self) -> bool:
        """A loss that need not fall: of reinforcement learning, or of two models against each other."""
        others = self.curves.others
        return "reward" in others or any(role.startswith("rival:") for role in others)

    @cached_property
    def float16(self) -> bool:
        told = str(self.settings.get("fp16", "")).lower()
        return len(self.curves.loss_scale) > 0 or told in ("1", "1.0", "true") or "skipped" in self.curves.others

    def at_step(self, step: float) -> str:
        """A place in the run, in words."""
        return f"{self.curves.unit} {step:,.0f}"


def format_number(value: float) -> str:
    """A number as a person would write it."""
    if not np.isfinite(value):
        return "NaN" if np.isnan(value) else ("inf" if value > 0 else "-inf")
    size = abs(value)
    if size and (size >= 1e5 or size < 1e-3):
        return f"{value:.2e}"
    return f"{value:.4g}"


def values_before(trace: Series, step: float, count: int = 20) -> Floats:
    """The last finite values of a trace up to a step."""
    values = trace.values[(trace.steps <= step) & np.isfinite(trace.values)]
    return values[-count:]


def mann_kendall(values: Floats) -> float:
    """Mann and Kendall's test of a trend: how many deviations the rises outnumber the falls by."""
    count = len(values)
    if count < 4:
        return 0.0
    if count > 400:
        values = values[np.linspace(0, count - 1, 400).astype(int)]
        count = 400
    pairs = np.sign(values[None, :] - values[:, None])
    total = float(np.triu(pairs, 1).sum())
    deviation = np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return total / float(deviation)


LR_RAISED_FACTOR = 3.0
"""A rate this many times what it was shortly before has been raised, and not only warmed up."""


def lr_raised(view: RunView, step: float) -> tuple[tuple[tuple[Cause, float], ...], tuple[str, ...]]:
    """Whether the learning rate was raised where trouble began: the causes that speaks for, and the words."""
    rates = values_before(view.curves.lr, step, 40)
    rates = rates[rates > 0]
    if len(rates) < 8:
        return (), ()
    usual, now = float(np.median(rates[: len(rates) // 2])), float(rates[-1])
    if now < LR_RAISED_FACTOR * usual:
        return (), ()
    words = f"the learning rate had just been raised from {format_number(usual)} to {format_number(now)}"
    return ((Cause.LEARNING_RATE, 0.6), (Cause.SCHEDULE, 0.4)), (words,)

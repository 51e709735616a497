"""Symptoms of trouble in a run, the thresholds that tell them from noise, and the view of a run they are found in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.run_curves import Floats, RunCurves, Series
from surefoot.logs.symptoms.loss_curve import LossCurve, logarithms, loss_curve
from surefoot.records import Cause, Pattern
from surefoot.signals.change_test import ChangeTest


@dataclass(frozen=True, slots=True, kw_only=True)
class SymptomThresholds:
    """Thresholds of the symptoms; levels and rises are logarithms, so 0.1 is about 10 %."""

    blowup_rise: float = 0.7
    """Rise of the loss above its lowest level that counts as divergence: it has doubled."""
    rise_to_noise: float = 2.5
    """The rise also has to be this many times the noise."""
    slow_rise: float = 0.1
    """Rise of the loss above its lowest level that is worth a warning."""
    spike_to_noise: float = 10.0
    """A spike is this many times the noise above the level on both sides."""
    overfit_rise: float = 0.15
    """Rise of the eval loss above its best that counts as overfitting."""
    min_fall: float = 0.05
    """Fall of the loss from the first to the last level, below which nothing was learnt."""


DEFAULT_THRESHOLDS = SymptomThresholds()


LOG_2 = float(np.log(2))
"""A doubled level, on the logarithmic scale of `LossCurve`."""
MIN_SIGMAS = 4.0
"""A change of level has to be this many times its own error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """Trouble found in a run."""

    verdict: RunHealth
    pattern: Pattern
    sentence: str
    onset: float | None
    causes: tuple[tuple[Cause, float], ...] = ()
    """Causes with the confidence that this symptom alone gives."""
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    """Advice about this symptom, before the advice about its causes."""


@dataclass(frozen=True, slots=True)
class LossScan:
    """Every finite loss, and the change test that went over all of them."""

    steps: Floats
    raw: Floats
    values: Floats
    """Their logarithms."""
    test: ChangeTest


@dataclass(frozen=True)
class RunView:
    """The curves of a run with what several symptom checks need, computed once."""

    curves: RunCurves
    settings: Mapping[str, float | str] = field(default_factory=dict)
    thresholds: SymptomThresholds = DEFAULT_THRESHOLDS

    @cached_property
    def loss(self) -> LossCurve | None:
        return loss_curve(self.curves.loss)

    @cached_property
    def scan(self) -> LossScan | None:
        """The change test over every loss, in the order of the log."""
        series = self.curves.loss
        finite = np.isfinite(series.values)
        steps, raw = series.steps[finite], series.values[finite]
        if not len(raw):
            return None
        values = logarithms(raw)
        test = ChangeTest()
        test.feed(values)
        return LossScan(steps, raw, values, test)

    @cached_property
    def eval_loss(self) -> LossCurve | None:
        return loss_curve(self.curves.eval_loss)

    @cached_property
    def grad_norm(self) -> LossCurve | None:
        """The gradient norm, unless it was logged as 0 because it was not measured."""
        values = self.curves.grad_norm.values
        return loss_curve(self.curves.grad_norm) if len(values) and np.any(values != 0) else None

    @property
    def adversarial(self) -> bool:
        """Whether the loss need not fall: reinforcement learning, or two models against each other."""
        others = self.curves.others
        return "reward" in others or any(role.startswith("rival:") for role in others)

    @cached_property
    def float16(self) -> bool:
        fp16 = str(self.settings.get("fp16", "")).lower()
        return len(self.curves.loss_scale) > 0 or fp16 in ("1", "1.0", "true") or "skipped" in self.curves.others

    def at_step(self, step: float) -> str:
        """A position in the run, such as "step 1,200"."""
        return f"{self.curves.unit} {step:,.0f}"


def format_number(value: float) -> str:
    """A number with four significant digits."""
    if not np.isfinite(value):
        return "NaN" if np.isnan(value) else ("inf" if value > 0 else "-inf")
    size = abs(value)
    if size and (size >= 1e5 or size < 1e-3):
        return f"{value:.2e}"
    return f"{value:.4g}"


def values_before(series: Series, step: float, count: int = 20) -> Floats:
    """The last finite values of a series up to a step."""
    values = series.values[(series.steps <= step) & np.isfinite(series.values)]
    return values[-count:]


def mann_kendall(values: Floats) -> float:
    """Mann-Kendall trend test: by how many standard deviations rises outnumber falls."""
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
"""An lr this many times its recent median has been raised, not just warmed up."""


def lr_raised(view: RunView, step: float) -> tuple[tuple[tuple[Cause, float], ...], tuple[str, ...]]:
    """Whether the learning rate was raised where trouble began: causes and evidence."""
    rates = values_before(view.curves.lr, step, 40)
    rates = rates[rates > 0]
    if len(rates) < 8:
        return (), ()
    usual, now = float(np.median(rates[: len(rates) // 2])), float(rates[-1])
    if now < LR_RAISED_FACTOR * usual:
        return (), ()
    words = f"the learning rate had just been raised from {format_number(usual)} to {format_number(now)}"
    return ((Cause.LEARNING_RATE, 0.6), (Cause.SCHEDULE, 0.4)), (words,)

"""A loss that does not fall: from the start, or from early on without having learnt much."""

from __future__ import annotations

import math

import numpy as np

from surefoot.logs.answer import RunHealth
from surefoot.logs.judging.levels import LossCurve
from surefoot.logs.judging.signs.base import RunView, Symptom, format_number, mann_kendall
from surefoot.records import Cause, Pattern

FEWEST = 8
"""Losses below which nothing is said."""
FALLING = 0.4
"""Share of that fall from which a loss that falls surely, if slowly, is learning."""
SURELY = 3.0
"""Deviations by which falls outnumber rises, to be sure of it."""
CLASSES = (2, 3, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 512, 1000)
"""Numbers of classes that data often has: a loss at the logarithm of one means that the model guesses."""
GUESSING = 0.004
"""How close to that logarithm, as a share of it."""


def find_plateau(view: RunView) -> Symptom | None:
    loss = view.loss
    if loss is None or len(loss) < FEWEST or view.adversarial or not _flat(loss, view.thresholds.min_fall):
        return None
    return _said(view, loss)


def _flat(loss: LossCurve, flat: float) -> bool:
    if loss.fall > FALLING * flat and mann_kendall(loss.values) < -SURELY:
        return False
    tenth = max(1, len(loss) // 10)
    settled = float(np.median(loss.values[tenth : tenth + max(3, tenth)]))
    still = settled - loss.last < flat and loss.fall < 2 * flat
    never_better = loss.start - loss.best < 3 * flat + 3 * loss.level_error
    return (loss.fall < flat or still) and never_better and loss.rise < max(3 * flat, 4 * loss.level_error)


def _classes(value: float) -> int | None:
    return next((n for n in CLASSES if abs(value - math.log(n)) < GUESSING * math.log(n)), None)


def _said(view: RunView, loss: LossCurve) -> Symptom:
    step = float(loss.steps[0])
    last = float(np.median(loss.raw[-max(3, len(loss) // 10) :]))
    share = float(-np.expm1(-loss.fall))
    evidence = [f"{format_number(float(loss.raw[0]))} at {view.at_step(step)}, {format_number(last)} at the end ({share:+.1%} learnt)"]
    causes: list[tuple[Cause, float]] = []
    advice: list[str] = []
    classes = _classes(last)
    if classes is not None:
        evidence.append(f"{format_number(last)} is the logarithm of {classes}: the model guesses among {classes} classes")
        causes.append((Cause.LABELS, 0.6))
        advice.append("Try to learn ten samples by heart: a model that cannot is broken, not short of data.")
    rates = view.curves.lr.values
    rates = rates[np.isfinite(rates)]
    if len(rates) and rates.max() == 0:
        evidence.append("the learning rate is 0 in the whole log")
        causes.insert(0, (Cause.NOT_UPDATING, 0.8))
    norms = view.curves.grad_norm.values
    norms = norms[np.isfinite(norms)]
    if len(norms) and 0 < np.median(norms) < 1e-6:
        evidence.append(f"the gradient norm is {format_number(float(np.median(norms)))}: next to nothing reaches the weights")
        causes.insert(0, (Cause.VANISHING_GRADIENT, 0.6))
    causes.append((Cause.PLATEAU, 0.5))
    return Symptom(
        verdict=RunHealth.WARNING,
        pattern=Pattern.PLATEAU,
        sentence=f"The loss does not fall: it stays around {format_number(last)} from {view.at_step(step)} to the end.",
        onset=step,
        causes=tuple(causes),
        evidence=tuple(evidence),
        advice=tuple(advice),
    )

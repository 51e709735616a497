"""An evaluation loss that rises while the training loss falls."""

from __future__ import annotations

import numpy as np

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.symptoms.loss_curve import LossCurve
from surefoot.logs.symptoms.symptom import LOG_2, RunView, Symptom, SymptomThresholds, format_number, mann_kendall
from surefoot.records import Cause, Pattern

MIN_LEVEL_ERRORS = 3.0
"""How many times its own spread that rise has to be."""
MIN_NOISE_RATIO = 1.5
"""How many times the noise of a single evaluation it has to be."""
MIN_TREND = 1.28
"""Deviations by which rises outnumber falls (one in ten by chance), for a curve too short to have clear levels."""
MIN_EVALS = 4
"""Evaluations below which nothing is said."""


def find_overfit(view: RunView) -> Symptom | None:
    train, held = view.loss, view.eval_loss
    if train is None or held is None or len(held) < MIN_EVALS or len(train) < MIN_EVALS or view.adversarial:
        return None
    if not (_eval_has_risen(held, view.thresholds) and _train_still_learning(train, held)):
        return None
    return _overfit_symptom(view, train, held)


def _eval_has_risen(held: LossCurve, sight: SymptomThresholds) -> bool:
    if held.rise > max(sight.overfit_rise, MIN_NOISE_RATIO * held.noise, MIN_LEVEL_ERRORS * held.level_error):
        return True
    return held.last - held.start > sight.overfit_rise and mann_kendall(held.values) > MIN_TREND


def _train_still_learning(train: LossCurve, held: LossCurve) -> bool:
    """Whether training got no worse while evaluation did, or was better still when its own trouble began."""
    turn = float(held.steps[held.best_at])
    later = train.level[train.steps >= turn]
    if not len(later):
        return False
    then = float(later[0])
    if train.last < min(then + train.noise, train.start - train.noise):
        return True
    best = float(later.min())
    reached = float(train.steps[train.steps >= turn][int(np.argmin(later))])
    meanwhile = held.level[held.steps <= reached]
    fell = best < then - LOG_2 / 2
    return fell and len(meanwhile) > 0 and float(meanwhile[-1]) > held.best + LOG_2 and held.rise > train.rise


def _overfit_symptom(view: RunView, train: LossCurve, held: LossCurve) -> Symptom:
    best_at = int(np.argmin(held.values))
    step = float(held.steps[best_at])
    best, last = float(held.raw[best_at]), float(np.median(held.raw[-max(1, min(3, len(held) // 4)) :]))
    now = format_number(float(np.median(train.raw[-3:])))
    return Symptom(
        verdict=RunHealth.WARNING,
        pattern=Pattern.OVERFIT,
        sentence=f"Overfitting since {view.at_step(step)}: the evaluation loss rises while the training loss falls.",
        onset=step,
        causes=((Cause.OVERFITTING, 0.85),),
        evidence=(
            f"evaluation: {format_number(best)} at {view.at_step(step)}, {format_number(last)} at the end",
            f"training: {format_number(float(train.raw[0]))} at the start, {now} at the end",
        ),
        advice=(f"Take the checkpoint from around {view.at_step(step)}: what came after it is worse on new data.",),
    )

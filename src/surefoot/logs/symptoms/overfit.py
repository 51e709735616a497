"""An eval loss that rises while the training loss falls."""

from __future__ import annotations

import numpy as np

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.symptoms.loss_curve import LossCurve
from surefoot.logs.symptoms.symptom import LOG_2, RunView, Symptom, SymptomThresholds, format_number, mann_kendall
from surefoot.records import Cause, Pattern

MIN_LEVEL_ERRORS = 3.0
"""The rise has to be this many times the error of the level."""
MIN_NOISE_RATIO = 1.5
"""The rise has to be this many times the noise of a single evaluation."""
MIN_TREND = 1.28
"""Mann-Kendall deviations (one in ten by chance), for curves too short for clear levels."""
MIN_EVALS = 4
"""Fewer evaluations are not judged."""


def find_overfit(view: RunView) -> Symptom | None:
    train, evals = view.loss, view.eval_loss
    if train is None or evals is None or len(evals) < MIN_EVALS or len(train) < MIN_EVALS or view.adversarial:
        return None
    if not (_eval_has_risen(evals, view.thresholds) and _train_still_learning(train, evals)):
        return None
    return _overfit_symptom(view, train, evals)


def _eval_has_risen(evals: LossCurve, thresholds: SymptomThresholds) -> bool:
    if evals.rise > max(thresholds.overfit_rise, MIN_NOISE_RATIO * evals.noise, MIN_LEVEL_ERRORS * evals.level_error):
        return True
    return evals.last - evals.start > thresholds.overfit_rise and mann_kendall(evals.values) > MIN_TREND


def _train_still_learning(train: LossCurve, evals: LossCurve) -> bool:
    """Whether training got no worse while evaluation did, or still improved when evaluation turned."""
    turn = float(evals.steps[evals.best_at])
    later = train.level[train.steps >= turn]
    if not len(later):
        return False
    then = float(later[0])
    if train.last < min(then + train.noise, train.start - train.noise):
        return True
    best = float(later.min())
    reached = float(train.steps[train.steps >= turn][int(np.argmin(later))])
    meanwhile = evals.level[evals.steps <= reached]
    fell = best < then - LOG_2 / 2
    return fell and len(meanwhile) > 0 and float(meanwhile[-1]) > evals.best + LOG_2 and evals.rise > train.rise


def _overfit_symptom(view: RunView, train: LossCurve, evals: LossCurve) -> Symptom:
    best_at = int(np.argmin(evals.values))
    step = float(evals.steps[best_at])
    best, last = float(evals.raw[best_at]), float(np.median(evals.raw[-max(1, min(3, len(evals) // 4)) :]))
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

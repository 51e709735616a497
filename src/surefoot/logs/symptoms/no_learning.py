"""A run that does not learn: a loss that stays flat, or is exactly 0 (a filtered NaN, or only masked labels)."""

from __future__ import annotations

import numpy as np

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.run_curves import Floats, Series
from surefoot.logs.symptoms.chance_level import guessed_classes
from surefoot.logs.symptoms.loss_curve import LossCurve
from surefoot.logs.symptoms.symptom import RunView, Symptom, format_number, mann_kendall
from surefoot.records import Cause, Pattern

MIN_PLATEAU_LOSSES = 8
"""Shorter runs are not judged."""
LEARNING_SHARE = 0.4
"""A loss that falls by this share of `min_fall` with a clear trend is learning."""
MIN_TREND = 3.0
"""Standard deviations of the Mann-Kendall test for a clear trend."""


def find_plateau(view: RunView) -> Symptom | None:
    loss = view.loss
    if (
        loss is None
        or len(loss) < MIN_PLATEAU_LOSSES
        or view.adversarial
        or not _is_flat(loss, view.thresholds.min_fall)
    ):
        return None
    return _plateau_symptom(view, loss)


def _is_flat(loss: LossCurve, flat: float) -> bool:
    if loss.fall > LEARNING_SHARE * flat and mann_kendall(loss.values) < -MIN_TREND:
        return False
    tenth = max(1, len(loss) // 10)
    settled = float(np.median(loss.values[tenth : tenth + max(3, tenth)]))
    still = settled - loss.last < flat and loss.fall < 2 * flat
    never_better = loss.start - loss.best < 3 * flat + 3 * loss.level_error
    return (loss.fall < flat or still) and never_better and loss.rise < max(3 * flat, 4 * loss.level_error)


def _plateau_symptom(view: RunView, loss: LossCurve) -> Symptom:
    step = float(loss.steps[0])
    last = float(np.median(loss.raw[-max(3, len(loss) // 10) :]))
    first = format_number(float(loss.raw[0]))
    share = float(-np.expm1(-loss.fall))
    evidence = [f"{first} at {view.at_step(step)}, {format_number(last)} at the end ({share:+.1%} learnt)"]
    causes: list[tuple[Cause, float]] = []
    advice: list[str] = []
    classes = guessed_classes(last, view.settings)
    if classes is not None:
        evidence.append(
            f"{format_number(last)} is the logarithm of {classes}: the model guesses among {classes} classes"
        )
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
        evidence.append(
            f"the gradient norm is {format_number(float(np.median(norms)))}: next to nothing reaches the weights"
        )
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


ZERO_SHARE = 0.9
"""Share of the losses from the onset on that are exactly 0."""
MIN_ZEROS = 3
MIN_DIGITS_ABOVE_ZERO = 50.0
"""Before it became 0, a loss must be this many last digits above 0: from near 0 it may have got there by learning."""


def find_zero_loss(view: RunView) -> Symptom | None:
    loss = view.curves.loss
    if view.adversarial:
        return None
    onset = _zero_onset(loss.values)
    if onset is None:
        return None
    norms = _norms_from(view, float(loss.steps[onset]))
    filtered = len(norms) > 0 and bool((~np.isfinite(norms)).mean() > 0.5)
    nothing = len(norms) > 0 and bool((norms == 0).mean() > 0.9)
    if not (filtered or nothing) and (len(norms) or not _fell_suddenly(loss.values, onset)):
        return None
    return _zero_loss_symptom(view, loss, onset, filtered=filtered, nothing=nothing)


def _zero_onset(values: Floats) -> int | None:
    """The index from which the losses are exactly 0 until the end."""
    zero = values == 0
    if zero.sum() < MIN_ZEROS or not zero[-1]:
        return None
    share = np.cumsum(zero[::-1]) / np.arange(1, len(zero) + 1)
    long = np.flatnonzero((share >= ZERO_SHARE)[::-1] & zero)
    onset = int(long[0])
    return onset if len(values) - onset >= MIN_ZEROS else None


def _norms_from(view: RunView, step: float) -> Floats:
    series = view.curves.grad_norm
    return series.values[series.steps >= step]


def _fell_suddenly(values: Floats, onset: int) -> bool:
    earlier = values[max(0, onset - 5) : onset]
    earlier = earlier[np.isfinite(earlier) & (earlier != 0)]
    if not len(earlier):
        return onset == 0
    digits = [len(f"{value:.10f}".rstrip("0").split(".")[1]) for value in earlier]
    return float(np.abs(earlier).min()) > MIN_DIGITS_ABOVE_ZERO * 10.0 ** -max(digits)


def _zero_loss_symptom(view: RunView, loss: Series, onset: int, *, filtered: bool, nothing: bool) -> Symptom:
    step = float(loss.steps[onset])
    zeros = int((loss.values[onset:] == 0).sum())
    evidence = [f"{zeros:,} losses are exactly 0 from {view.at_step(step)} on, and none is small but not 0"]
    earlier = loss.values[:onset]
    if len(earlier) and np.isfinite(earlier[-1]):
        evidence.append(f"the loss before was {format_number(float(earlier[-1]))}")
    if filtered:
        evidence.append("the gradient norm is NaN there: the trainer wrote 0 for a loss that was NaN")
        causes = ((Cause.PRECISION_OVERFLOW, 0.5), (Cause.LEARNING_RATE, 0.25), (Cause.BAD_BATCH, 0.25))
        advice = ("Set logging_nan_inf_filter=False (Hugging Face Trainer) to see the NaN where it first comes.",)
        explanation = "the loss is NaN, written as 0.0"
    else:
        if nothing:
            evidence.append("the gradient norm is exactly 0 there: no weight moves")
        causes = ((Cause.LABELS, 0.6), (Cause.NOT_UPDATING, 0.25), (Cause.PRECISION_OVERFLOW, 0.15))
        advice = (
            "Count the labels of one batch that are not masked (-100).",
            "Check the prompt template and the cut at the longest sequence: either can leave no answer to learn from.",
        )
        explanation = "the loss is exactly 0, so there is nothing to learn from"
    since = "from the first step logged" if onset == 0 else f"since {view.at_step(step)}"
    return Symptom(
        verdict=RunHealth.FAILED,
        pattern=Pattern.COLLAPSE_TO_ZERO,
        sentence=f"Nothing is learnt {since}: {explanation}.",
        onset=step,
        causes=causes,
        evidence=tuple(evidence),
        advice=advice,
    )

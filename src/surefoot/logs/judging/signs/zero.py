"""A loss of exactly 0 where nothing is learnt: a NaN that the trainer filtered out, or labels that are all masked."""

from __future__ import annotations

import numpy as np

from surefoot.logs.answer import RunHealth
from surefoot.logs.course import Floats, Series
from surefoot.logs.judging.signs.base import RunView, Symptom, format_number
from surefoot.records import Cause, Pattern

SHARE = 0.9
"""Share of the losses from the onset on that are exactly 0."""
LEAST = 3
"""Zeros that make the sign."""
ABOVE = 50.0
"""How far above the last digit that the log prints a loss was before it was 0: from near 0 it may have got there."""


def find_zero_loss(view: RunView) -> Symptom | None:
    loss = view.curves.loss
    if view.adversarial:
        return None
    onset = _onset(loss.values)
    if onset is None:
        return None
    norms = _norms(view, float(loss.steps[onset]))
    filtered = len(norms) > 0 and bool((~np.isfinite(norms)).mean() > 0.5)
    nothing = len(norms) > 0 and bool((norms == 0).mean() > 0.9)
    if not (filtered or nothing) and (len(norms) or not _fell_at_once(loss.values, onset)):
        return None
    return _said(view, loss, onset, filtered=filtered, nothing=nothing)


def _onset(values: Floats) -> int | None:
    """Where the losses became exactly 0, if they stay so until the end."""
    zero = values == 0
    if zero.sum() < LEAST or not zero[-1]:
        return None
    share = np.cumsum(zero[::-1]) / np.arange(1, len(zero) + 1)
    long = np.flatnonzero((share >= SHARE)[::-1] & zero)
    onset = int(long[0])
    return onset if len(values) - onset >= LEAST else None


def _norms(view: RunView, step: float) -> Floats:
    trace = view.curves.grad_norm
    return trace.values[trace.steps >= step]


def _fell_at_once(values: Floats, onset: int) -> bool:
    earlier = values[max(0, onset - 5) : onset]
    earlier = earlier[np.isfinite(earlier) & (earlier != 0)]
    if not len(earlier):
        return onset == 0
    digits = [len(f"{value:.10f}".rstrip("0").split(".")[1]) for value in earlier]
    return float(np.abs(earlier).min()) > ABOVE * 10.0 ** -max(digits)


def _said(view: RunView, loss: Series, onset: int, *, filtered: bool, nothing: bool) -> Symptom:
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
        told = "the loss is NaN, written as 0.0"
    else:
        if nothing:
            evidence.append("the gradient norm is exactly 0 there: no weight moves")
        causes = ((Cause.LABELS, 0.6), (Cause.NOT_UPDATING, 0.25), (Cause.PRECISION_OVERFLOW, 0.15))
        advice = (
            "Count the labels of one batch that are not masked (-100).",
            "Check the prompt template and the cut at the longest sequence: either can leave no answer to learn from.",
        )
        told = "the loss is exactly 0, so there is nothing to learn from"
    since = "from the first step logged" if onset == 0 else f"since {view.at_step(step)}"
    return Symptom(
        verdict=RunHealth.FAILED,
        pattern=Pattern.COLLAPSE_TO_ZERO,
        sentence=f"Nothing is learnt {since}: {told}.",
        onset=step,
        causes=causes,
        evidence=tuple(evidence),
        advice=advice,
    )

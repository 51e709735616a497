"""Spikes of the loss that came back."""

from __future__ import annotations

import numpy as np

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.symptoms.loss_curve import LossCurve
from surefoot.logs.symptoms.raised_level import raised_level
from surefoot.logs.symptoms.symptom import LOG_2, RunView, Symptom, format_number
from surefoot.records import Cause, Pattern

SPIKE_WINDOW = 10
"""Values on either side that define the levels."""
MIN_POINTS_BEFORE_PEAK = 3
"""No spikes before this many values: a run starts high."""
EARLY_SHARE = 0.02
"""Share of the run that is its beginning, in which spikes are normal."""
MANY_PEAKS = 400
"""With so many values, the highest hundredth of them says how high peaks usually are."""
USUAL_PEAK = 0.99
ABOVE_USUAL = 2.5
"""A spike is so many times as high as usual peaks."""


def find_spike(view: RunView) -> Symptom | None:
    if view.adversarial:
        return None
    loss = view.loss if raised_level(view) is None else None  # a loss that did not come back is no spike
    for curve, what in ((loss, "loss"), (view.eval_loss, "evaluation loss")):
        at = highest_peak(curve, view.thresholds.spike_to_noise)
        if curve is not None and at is not None:
            return _spike_symptom(view, curve, at, what)
    return None


def highest_peak(curve: LossCurve | None, above: float) -> int | None:
    """The index of the highest peak that is `above` times the noise above its surroundings."""
    if curve is None or len(curve) < 2 * MIN_POINTS_BEFORE_PEAK:
        return None
    values = curve.peaks
    apart = np.abs(values - np.median(values)) if len(values) < 8 else np.abs(np.diff(values))
    least = max(LOG_2, above * max(curve.noise, 1.05 * float(np.median(apart))))
    heights = values - curve.level
    if len(values) >= MANY_PEAKS:
        least = max(least, ABOVE_USUAL * float(np.quantile(heights, USUAL_PEAK)))
    order = np.argsort(heights)[::-1][:20]
    first = max(MIN_POINTS_BEFORE_PEAK, int(EARLY_SHARE * len(values)))
    for at in (int(index) for index in order if first <= index < len(values) - 1):
        earlier, later = values[max(0, at - SPIKE_WINDOW) : at], values[at + 1 : at + 1 + 3 * SPIKE_WINDOW]
        sides = max(float(np.median(earlier)), float(np.min(later[-SPIKE_WINDOW:])))
        if values[at] - sides > least:
            return at
    return None


def _spike_symptom(view: RunView, curve: LossCurve, at: int, what: str) -> Symptom:
    step = float(curve.steps[at])
    side = float(np.median(curve.values[max(0, at - SPIKE_WINDOW) : at]))
    times = float(np.exp(min(curve.peaks[at] - side, 700.0)))
    usual = format_number(float(np.median(curve.raw[max(0, at - SPIKE_WINDOW) : at])))
    last = format_number(float(np.median(curve.raw[-3:])))
    return Symptom(
        verdict=RunHealth.WARNING,
        pattern=Pattern.RECOVERED_SPIKE,
        sentence=f"The {what} spiked {times:,.3g}-fold at {view.at_step(step)} and came back.",
        onset=step,
        causes=((Cause.BAD_BATCH, 0.4), (Cause.LEARNING_RATE, 0.25), (Cause.TRANSIENT, 0.2)),
        evidence=(f"about {usual} before the spike, {last} at the end of the run",),
    )

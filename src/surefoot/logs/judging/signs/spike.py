"""A peak in the loss that came back down."""

from __future__ import annotations

import numpy as np

from surefoot.logs.answer import RunHealth
from surefoot.logs.judging.levels import LossCurve
from surefoot.logs.judging.signs.base import LOG_2, RunView, Symptom, format_number
from surefoot.logs.judging.signs.leap import first_lasting_jump
from surefoot.records import Cause, Pattern

AROUND = 10
"""Values on either side that make those levels."""
SETTLED = 3
"""Values before which nothing is a peak: a run begins high."""
EARLY = 0.02
"""Share of the run that is its beginning, in which peaks are part of finding the way."""


def find_spike(view: RunView) -> Symptom | None:
    if view.adversarial:
        return None
    loss = view.loss if first_lasting_jump(view) is None else None  # what has not come back is told as a jump
    for curve, what in ((loss, "loss"), (view.eval_loss, "evaluation loss")):
        at = highest_peak(curve, view.thresholds.spike_to_noise)
        if curve is not None and at is not None:
            return _said(view, curve, at, what)
    return None


def highest_peak(curve: LossCurve | None, above: float) -> int | None:
    """Where the highest peak stands that is so many times above the noise."""
    if curve is None or len(curve) < 2 * SETTLED:
        return None
    values = curve.peaks
    apart = np.abs(values - np.median(values)) if len(values) < 8 else np.abs(np.diff(values))
    noise = max(curve.noise, 1.05 * float(np.median(apart)))
    order = np.argsort(values - curve.level)[::-1][:20]
    first = max(SETTLED, int(EARLY * len(values)))
    for at in (int(index) for index in order if first <= index < len(values) - 1):
        earlier, later = values[max(0, at - AROUND) : at], values[at + 1 : at + 1 + 3 * AROUND]
        sides = max(float(np.median(earlier)), float(np.min(later[-AROUND:])))
        if values[at] - sides > max(LOG_2, above * noise):
            return at
    return None


def _said(view: RunView, curve: LossCurve, at: int, what: str) -> Symptom:
    step = float(curve.steps[at])
    side = float(np.median(curve.values[max(0, at - AROUND) : at]))
    times = float(np.exp(min(curve.peaks[at] - side, 700.0)))
    usual = format_number(float(np.median(curve.raw[max(0, at - AROUND) : at])))
    last = format_number(float(np.median(curve.raw[-3:])))
    return Symptom(
        verdict=RunHealth.WARNING,
        pattern=Pattern.RECOVERED_SPIKE,
        sentence=f"The {what} spiked {times:,.3g}-fold at {view.at_step(step)} and came back.",
        onset=step,
        causes=((Cause.BAD_BATCH, 0.4), (Cause.LEARNING_RATE, 0.25), (Cause.TRANSIENT, 0.2)),
        evidence=(f"about {usual} before the spike, {last} at the end of the run",),
    )

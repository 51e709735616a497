"""Jumps of the loss: lasting ones that never came back to the earlier level, and spikes that did."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.run_curves import Floats, Series
from surefoot.logs.symptoms.loss_curve import MAX_POINTS, MIN_NOISE, LossCurve, loss_curve, running_median
from surefoot.logs.symptoms.symptom import LOG_2, RunView, Symptom, format_number, lr_raised
from surefoot.records import Cause, Pattern

WINDOW_BEFORE, WINDOW_AFTER = 10, 3
"""Values whose medians are the levels before and after a jump."""
MIN_VALUES_BEFORE = 20
"""No jumps before this many values: a run starts high and settles."""
NOISE_WINDOW = 40
"""Values before a jump from which its noise is measured."""
SINGLE_STEP_SHARE = 0.5
"""Share of the rise that must come from one value to the next: waves and slow rises are no jumps."""
MIN_VALUES_AFTER = 8
"""With fewer values after a jump it is unknown whether the loss stays up."""
RECOVERED_SHARE = 0.1
"""Share of the values after a jump that may be low without the loss having recovered."""
LEVEL_WINDOW = 11
"""Window of the levels after a jump."""
MIN_MARGIN = 0.1
"""Distance from the level before, on the logarithmic scale of `LossCurve`, within which a loss has recovered: 10 %."""
MARGIN_TO_NOISE, MARGIN_TO_PROGRESS = 2.5, 0.1
"""The same relative to the noise before the jump, and to the progress made by then."""
PRECEDENT_SHARE = 0.8
"""An earlier jump of this relative size that recovered is a precedent."""

JUMP_CAUSES = ((Cause.BAD_BATCH, 0.4), (Cause.PRECISION_OVERFLOW, 0.2), (Cause.LEARNING_RATE, 0.2))


@dataclass(frozen=True, slots=True)
class LastingJump:
    """A jump from which the loss did not recover."""

    step: float
    before: float
    """The level before it, as logged."""
    top: float
    last: float
    rise: float
    """From the level before to the last one, on the logarithmic scale of `LossCurve`."""
    noise: float
    precedent: bool
    """A similar jump recovered earlier in the run."""


def find_lasting_jump(view: RunView) -> Symptom | None:
    """A lasting jump: failed if the loss is still twice as high, unless a similar jump recovered earlier."""
    leap = first_lasting_jump(view)
    if leap is None:
        return None
    enough = max(view.thresholds.blowup_rise, view.thresholds.rise_to_noise * leap.noise)
    above = f"{np.expm1(leap.rise):.0%}".replace("%", " %")
    rate, words = lr_raised(view, leap.step)
    return Symptom(
        verdict=RunHealth.FAILED if leap.rise > enough and not leap.precedent else RunHealth.WARNING,
        pattern=Pattern.JUMP,
        sentence=f"The loss jumped up at {view.at_step(leap.step)} and has not come back to the level before.",
        onset=leap.step,
        causes=rate or JUMP_CAUSES,
        evidence=(
            f"about {format_number(leap.before)} before the jump, {format_number(leap.top)} at its highest",
            f"{format_number(leap.last)} at the end, {above} above the level before",
            *words,
        ),
    )


def first_lasting_jump(view: RunView) -> LastingJump | None:
    """The first jump of the training loss from which it never recovered."""
    loss = view.loss
    if loss is None or view.adversarial:
        return None
    jump = _find_in_curve(loss, loss.start, view.thresholds.spike_to_noise)
    if jump is None and len(view.curves.loss) > MAX_POINTS:  # buckets hide a jump near the end
        series = view.curves.loss
        tail = loss_curve(Series(series.name, series.steps[-MAX_POINTS:], series.values[-MAX_POINTS:]))
        jump = (
            _find_in_curve(tail, max(loss.start, tail.start), view.thresholds.spike_to_noise)
            if tail is not None
            else None
        )
    return jump


def recovery_margin(noise: float, progress: float) -> float:
    """How far above its earlier level a loss may be and still count as recovered."""
    return max(MIN_MARGIN, MARGIN_TO_NOISE * noise, MARGIN_TO_PROGRESS * progress)


def _find_in_curve(loss: LossCurve, start: float, above_noise: float) -> LastingJump | None:
    values = loss.values
    if len(values) < MIN_VALUES_BEFORE + MIN_VALUES_AFTER:
        return None
    places, before, noise, heights = _candidates(values, above_noise)
    came_back = 0.0
    for at, level, spread, height in zip(places, before, noise, heights, strict=True):
        lowest = min(running_median(values[at:], LEVEL_WINDOW).min(), np.quantile(values[at:], RECOVERED_SHARE))
        if lowest - level <= recovery_margin(spread, start - level):
            came_back = max(came_back, float(height))
            continue
        last = float(np.median(values[at:][-WINDOW_BEFORE:]))
        return LastingJump(
            step=float(loss.steps[at]),
            before=float(np.median(loss.raw[max(0, at - WINDOW_BEFORE) : at])),
            top=float(loss.raw[at:].max()),
            last=float(np.median(loss.raw[at:][-WINDOW_BEFORE:])),
            rise=last - float(level),
            noise=float(spread),
            precedent=came_back >= PRECEDENT_SHARE * float(height),
        )
    return None


def _candidates(values: Floats, above_noise: float) -> tuple[list[int], Floats, Floats, Floats]:
    """Where the values after are far above those before: first index, level, noise and height of each stretch."""
    count = len(values)
    levels = np.median(sliding_window_view(values, WINDOW_BEFORE), axis=1)[
        : count - WINDOW_BEFORE
    ]  # from index WINDOW_BEFORE on
    tops = np.median(sliding_window_view(values, WINDOW_AFTER), axis=1)
    places = np.arange(MIN_VALUES_BEFORE, count - MIN_VALUES_AFTER + 1)
    # Differences of neighbours, as the trend of a fast falling loss is not noise.
    apart = np.concatenate([np.full(NOISE_WINDOW, np.nan), np.abs(np.diff(values))])
    spreads = np.nanmedian(sliding_window_view(apart, NOISE_WINDOW)[places - 1], axis=1) * 1.4826 / np.sqrt(2)
    noise = np.maximum(spreads, MIN_NOISE)
    before, heights = levels[places - WINDOW_BEFORE], tops[places] - levels[places - WINDOW_BEFORE]
    around = sliding_window_view(np.diff(values), WINDOW_AFTER)[places - 1]
    moves = around.max(axis=1)
    leaps = np.flatnonzero((heights > np.maximum(LOG_2, above_noise * noise)) & (moves > SINGLE_STEP_SHARE * heights))
    first = leaps[np.diff(leaps, prepend=-2) > 1] if len(leaps) else leaps
    at = places[first] + around[first].argmax(axis=1)  # the value that jumped, of the few in the window
    return at.tolist(), before[first], noise[first], heights[first]


SPIKE_WINDOW = 10
"""Values on either side that define the levels."""
MIN_POINTS_BEFORE_PEAK = 3
"""No spikes before this many values: a run starts high."""
EARLY_SHARE = 0.02
"""Share of the run that is its beginning, in which spikes are normal."""


def find_spike(view: RunView) -> Symptom | None:
    if view.adversarial:
        return None
    loss = view.loss if first_lasting_jump(view) is None else None  # a loss that did not recover is a jump
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
    noise = max(curve.noise, 1.05 * float(np.median(apart)))
    order = np.argsort(values - curve.level)[::-1][:20]
    first = max(MIN_POINTS_BEFORE_PEAK, int(EARLY_SHARE * len(values)))
    for at in (int(index) for index in order if first <= index < len(values) - 1):
        earlier, later = values[max(0, at - SPIKE_WINDOW) : at], values[at + 1 : at + 1 + 3 * SPIKE_WINDOW]
        sides = max(float(np.median(earlier)), float(np.min(later[-SPIKE_WINDOW:])))
        if values[at] - sides > max(LOG_2, above * noise):
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

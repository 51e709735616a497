"""A loss that leapt up and has not come back to the level it had before, however long ago and however short the log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from surefoot.logs.answer import RunHealth
from surefoot.logs.course import Floats, Series
from surefoot.logs.judging.levels import MAX_POINTS, MIN_NOISE, LossCurve, loss_curve, running_median
from surefoot.logs.judging.signs.base import LOG_2, RunView, Symptom, format_number, lr_raised
from surefoot.records import Cause, Pattern

BEFORE, AFTER = 10, 3
"""Values whose medians are the level before a leap, and the level it leapt to."""
SETTLED = 20
"""Values before which nothing is a leap: a run begins high, and finds its way."""
CALM = 40
"""Values before a leap that its noise is told from."""
AT_ONCE = 0.5
"""Share of the rise that has to come from one value to the next: waves and slow rises are no leaps."""
FEWEST = 8
"""Values after a leap below which it cannot be told whether the loss stays up."""
STAY = 0.1
"""Share of the values after it that may be back without the loss being so."""
LEVEL = 11
"""Values that make the levels after it."""
NEAR = 0.1
"""Distance from the level before, on the scale of `levels`, within which a loss is back: 10 %."""
OF_NOISE, OF_PROGRESS = 2.5, 0.1
"""The same in terms of the noise before the leap, and of what had been learnt by then."""
ALIKE = 0.8
"""Share of a leap's size from which an earlier one that came back is a precedent for it."""

JUMP_CAUSES = ((Cause.BAD_BATCH, 0.4), (Cause.PRECISION_OVERFLOW, 0.2), (Cause.LEARNING_RATE, 0.2))


@dataclass(frozen=True, slots=True)
class LastingJump:
    """Where a loss leapt, from which level, and how far above that level it stands at the end."""

    step: float
    before: float
    """The level before it, as it was logged."""
    top: float
    last: float
    rise: float
    """From the level before to the last one, on the scale of `levels`."""
    noise: float
    precedent: bool
    """A leap like it came back earlier in the run."""


def find_lasting_jump(view: RunView) -> Symptom | None:
    """Failed where the loss still stands twice as high as before, unless the run has come back from the like."""
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
    """The first leap of the training loss from which it never came back."""
    loss = view.loss
    if loss is None or view.adversarial:
        return None
    found = _leap(loss, loss.start, view.thresholds.spike_to_noise)
    if found is None and len(view.curves.loss) > MAX_POINTS:  # stretches that were put together hide a leap near the end
        trace = view.curves.loss
        tail = loss_curve(Series(trace.name, trace.steps[-MAX_POINTS:], trace.values[-MAX_POINTS:]))
        found = _leap(tail, max(loss.start, tail.start), view.thresholds.spike_to_noise) if tail is not None else None
    return found


def recovery_margin(noise: float, progress: float) -> float:
    """How far above the level it had before a loss may be and still be back."""
    return max(NEAR, OF_NOISE * noise, OF_PROGRESS * progress)


def _leap(loss: LossCurve, start: float, above_noise: float) -> LastingJump | None:
    values = loss.values
    if len(values) < SETTLED + FEWEST:
        return None
    places, before, noise, heights = _candidates(values, above_noise)
    came_back = 0.0
    for at, level, spread, height in zip(places, before, noise, heights, strict=True):
        lowest = min(running_median(values[at:], LEVEL).min(), np.quantile(values[at:], STAY))
        if lowest - level <= recovery_margin(spread, start - level):
            came_back = max(came_back, float(height))
            continue
        last = float(np.median(values[at:][-BEFORE:]))
        return LastingJump(
            step=float(loss.steps[at]),
            before=float(np.median(loss.raw[max(0, at - BEFORE) : at])),
            top=float(loss.raw[at:].max()),
            last=float(np.median(loss.raw[at:][-BEFORE:])),
            rise=last - float(level),
            noise=float(spread),
            precedent=came_back >= ALIKE * float(height),
        )
    return None


def _candidates(values: Floats, above_noise: float) -> tuple[list[int], Floats, Floats, Floats]:
    """Places where the values after are far above those before: the first of each such stretch, its level and noise."""
    count = len(values)
    levels = np.median(sliding_window_view(values, BEFORE), axis=1)[: count - BEFORE]  # before place BEFORE, and on
    tops = np.median(sliding_window_view(values, AFTER), axis=1)
    places = np.arange(SETTLED, count - FEWEST + 1)
    # From one value to the next, as the trend of a loss that falls fast is no noise.
    apart = np.concatenate([np.full(CALM, np.nan), np.abs(np.diff(values))])
    spreads = np.nanmedian(sliding_window_view(apart, CALM)[places - 1], axis=1) * 1.4826 / np.sqrt(2)
    noise = np.maximum(spreads, MIN_NOISE)
    before, heights = levels[places - BEFORE], tops[places] - levels[places - BEFORE]
    around = sliding_window_view(np.diff(values), AFTER)[places - 1]
    moves = around.max(axis=1)
    leaps = np.flatnonzero((heights > np.maximum(LOG_2, above_noise * noise)) & (moves > AT_ONCE * heights))
    first = leaps[np.diff(leaps, prepend=-2) > 1] if len(leaps) else leaps
    at = places[first] + around[first].argmax(axis=1)  # the value that leapt, of the few that the median is over
    return at.tolist(), before[first], noise[first], heights[first]

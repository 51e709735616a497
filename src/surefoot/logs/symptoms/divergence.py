"""A loss that diverged and did not recover: in one jump, exponentially, or in widening swings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.run_curves import Series
from surefoot.logs.symptoms.loss_curve import MAX_POINTS, LossCurve, loss_curve
from surefoot.logs.symptoms.raised_level import JUMP_CAUSES, PRECEDENT_SHARE, find_raised_level, raised_level
from surefoot.logs.symptoms.symptom import (
    LOG_2,
    MIN_SIGMAS,
    RunView,
    Symptom,
    SymptomThresholds,
    format_number,
    lr_raised,
)
from surefoot.records import Cause, Pattern

JUMP_SHARE = 0.6
"""Share of the rise within one window from which it was a jump."""
JUMP_WINDOW = 0.02
"""Length of that window, as a share of the run."""
MIN_CROSSINGS = 3
"""Crossings of the midpoint between low and high from which the loss oscillates."""
SWING_GROWTH = 3.0
"""How much wider the last swings are than those in the calmest part of the run."""
MIN_LOSSES = 4
"""Shorter runs are not judged."""
MIN_ROWS_TO_WANDER = 200
"""Fewer losses do not show whether a run wanders."""
WANDER_SHARE = 0.5
"""A rise of which this share has been seen before, and came back to the best level, is how this run is."""
START_NOISES = 3.0
"""Above the first level by this many times the noise of a row is still near it."""
LEARNT_NOISES = 5.0
"""A loss that fell by less than this many times the noise of a row has no trend to lose."""
SHORT_RUN = 60
"""In shorter runs the noise is also measured between neighbours."""
END_WINDOW = 10
"""Values before the end that define the usual level."""
CERTAIN_JUMP_FACTOR = 10.0
"""A last value this many times the usual level is a failure, whatever would have followed."""


def find_divergence(view: RunView) -> Symptom | None:
    symptom = _diverged(view)
    if symptom is None or symptom.verdict is not RunHealth.FAILED or view.loss is None or not _wanders(view, view.loss):
        return symptom
    return replace(symptom, verdict=RunHealth.WARNING)


def _diverged(view: RunView) -> Symptom | None:
    loss = view.loss
    if loss is None or len(loss) < MIN_LOSSES or view.adversarial:
        return None
    if _has_blown_up(loss, view.thresholds):
        return _classify_blowup(view, loss)
    if _swings_widen(loss):
        return _divergence_symptom(view, loss, Pattern.OSCILLATING, loss.best_at)
    raised = find_raised_level(view)
    if raised is not None and raised.pattern is Pattern.JUMP:
        return raised
    return _ends_high(view) or raised or _slow_rise(view, loss)


def _ends_high(view: RunView) -> Symptom | None:
    """A jump in the very last values; the log does not show what follows."""
    series = view.curves.loss
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    for last in (3, 2, 1):
        before = values[:-last][-END_WINDOW:]
        if len(before) and len(values) <= MAX_POINTS and values[-last:].min() <= 2 * np.median(before):
            continue  # decided without the whole curve, as nearly always
        earlier = loss_curve(Series(series.name, steps[:-last], values[:-last]))
        if earlier is None or len(earlier) < 3 or values[:-last].min() < 0:
            continue
        usual = float(np.median(earlier.raw[-END_WINDOW:]))
        least = usual * float(np.exp(max(LOG_2, view.thresholds.spike_to_noise * earlier.noise)))
        if usual > 0 and values[-last:].min() > least:
            return _jump_at_end(view, float(steps[-last]), float(values[-last:].max()), usual, last)
    return None


def _jump_at_end(view: RunView, step: float, top: float, usual: float, last: int) -> Symptom:
    sure = last == 3 or top > CERTAIN_JUMP_FACTOR * usual
    return Symptom(
        verdict=RunHealth.FAILED if sure else RunHealth.WARNING,
        pattern=Pattern.JUMP,
        sentence=f"The loss jumped up {top / usual:,.3g}-fold at {view.at_step(step)}, where the log ends.",
        onset=step,
        causes=_PATTERN_CAUSES[Pattern.JUMP],
        evidence=(f"about {format_number(usual)} before, {format_number(top)} at the end of the log",),
    )


def _has_blown_up(loss: LossCurve, thresholds: SymptomThresholds) -> bool:
    least = max(thresholds.blowup_rise, thresholds.rise_to_noise * loss.noise, MIN_SIGMAS * loss.level_error)
    if len(loss) < SHORT_RUN:
        # A level through few values follows them and leaves little noise; differences of neighbours contain all of it.
        apart = float(np.median(np.abs(np.diff(loss.values))))
        least = max(least, thresholds.rise_to_noise * apart)
    return loss.rise > least and loss.best_at < len(loss) - 2


def _wanders(view: RunView, loss: LossCurve) -> bool:
    """Whether the loss ends near where it began, and rose like this before or never fell out of its noise."""
    long = view.scan is not None and len(view.scan.raw) >= MIN_ROWS_TO_WANDER
    noise = view.scan.test.baseline.noise if view.scan is not None and long else 0.0
    raised = raised_level(view)
    rise = max(loss.rise, raised.rise if raised is not None else 0.0)
    if raised is not None and raised.sudden and raised.rise > LEARNT_NOISES * noise:
        return False  # a jump out of the noise: judged by what it came from
    if (rise < LOG_2 and not long) or loss.best + rise > loss.start + max(LOG_2, START_NOISES * noise):
        return False
    before = loss.level[: max(loss.best_at, 1)]
    rose_before = float((before - np.minimum.accumulate(before)).max())
    least = (WANDER_SHARE if long else PRECEDENT_SHARE) * rise
    return rose_before >= least or max(loss.start - loss.best, 0.0) < LEARNT_NOISES * noise


def _classify_blowup(view: RunView, loss: LossCurve) -> Symptom:
    middle = (loss.best + loss.last) / 2
    above = loss.level > middle
    crossings = int(np.sum(above[1:] != above[:-1]))
    if (crossings >= MIN_CROSSINGS and _visits_both_sides(loss, middle)) or _rises_in_swings(loss):
        return _divergence_symptom(view, loss, Pattern.OSCILLATING, int(np.flatnonzero(above)[0]))
    after = loss.values[loss.best_at :]
    stretch = max(1, int(JUMP_WINDOW * len(loss)))
    highest = np.maximum.accumulate(after)
    gains = highest[stretch:] - highest[:-stretch] if len(highest) > stretch else np.zeros(1)
    total = float(highest[-1] - after[0])
    if total > 0 and float(gains.max()) > JUMP_SHARE * total:
        raised = raised_level(view)
        if raised is not None and raised.sudden and (dated := find_raised_level(view)) is not None:
            return dated  # to the row, not to the bucket
        half = after[0] + 0.5 * float(gains.max())
        return _divergence_symptom(view, loss, Pattern.JUMP, loss.best_at + int(np.flatnonzero(after > half)[0]))
    low = np.flatnonzero(after <= loss.best + 2 * loss.noise)
    return _divergence_symptom(view, loss, Pattern.EXPONENTIAL, loss.best_at + (int(low[-1]) + 1 if len(low) else 0))


def _visits_both_sides(loss: LossCurve, middle: float) -> bool:
    """Whether the level is on both sides for a while, so that it is not a single noisy rise."""
    below = np.flatnonzero(loss.level <= middle)
    early = loss.level[: max(1, below[-1])]
    return bool((early > middle).mean() > 0.1)


def _rises_in_swings(loss: LossCurve) -> bool:
    """Whether a rise consists of swings that grew with it and are as large as it is."""
    quarter = max(4, len(loss) // 4)
    apart = np.abs(loss.values - loss.level)
    calm = apart[max(0, loss.best_at - quarter // 2) : loss.best_at + quarter // 2]
    late = apart[-quarter:]
    wide = float(np.quantile(late, 0.8))
    return wide > 0.4 * loss.rise and wide > SWING_GROWTH * max(float(np.quantile(calm, 0.8)), 0.02)


def _swings_widen(loss: LossCurve) -> bool:
    """Whether peaks rise while lows do not: the swings grow, not the level."""
    count = len(loss)
    if count < 16:
        return _alternates_wider(loss)
    quarter = count // 4
    parts = [loss.values[at * quarter : (at + 1) * quarter] for at in range(4)]
    wide = [float(np.quantile(part, 0.9) - np.quantile(part, 0.1)) for part in parts]
    high = [float(np.quantile(part, 0.9)) for part in parts]
    calm = int(np.argmin(wide[:3]))
    grown = wide[3] > SWING_GROWTH * max(wide[calm], loss.noise / 2) and wide[3] > 2 * LOG_2
    above = parts[3] > high[calm] + LOG_2
    peaks = int(np.sum(above[1:] & ~above[:-1])) + int(above[0])
    return grown and peaks >= MIN_CROSSINGS and high[3] > loss.start


def _alternates_wider(loss: LossCurve) -> bool:
    """Whether a few values go up and down, further each time."""
    moves = np.diff(loss.values)
    if len(moves) < 4 or not np.all(moves[1:] * moves[:-1] < 0):
        return False
    sizes = np.abs(moves)
    return bool(sizes[-2:].mean() > 1.5 * sizes[:2].mean() and loss.values.max() > loss.start + LOG_2)


def _divergence_symptom(view: RunView, loss: LossCurve, pattern: Pattern, at: int) -> Symptom:
    at = min(max(at, 0), len(loss) - 1)
    step = float(loss.steps[at])
    low = format_number(float(loss.raw[max(0, loss.best_at - 1) : loss.best_at + 2].mean()))
    low_at = view.at_step(float(loss.steps[loss.best_at]))
    last = format_number(float(np.median(loss.raw[-max(3, len(loss) // 10) :])))
    top = int(np.argmax(loss.values[at:])) + at
    evidence = [
        f"the loss was down to {low} at {low_at} and stands at {last} at the end",
        f"its highest since then: {format_number(float(loss.raw[top]))} at {view.at_step(float(loss.steps[top]))}",
    ]
    if loss.last > loss.start:
        evidence.append(f"it ends above where it began ({format_number(float(loss.raw[0]))})")
    sentences = {
        Pattern.JUMP: f"The loss jumped up at {view.at_step(step)} and has not come back.",
        Pattern.EXPONENTIAL: f"The loss has been growing since {view.at_step(step)}.",
        Pattern.OSCILLATING: f"The loss swings between two levels, wider than it learns, since {view.at_step(step)}.",
    }
    rate, words = lr_raised(view, step)
    return Symptom(
        verdict=RunHealth.FAILED,
        pattern=pattern,
        sentence=sentences[pattern],
        onset=step,
        causes=rate or _PATTERN_CAUSES[pattern],
        evidence=(*evidence, *words),
    )


_PATTERN_CAUSES: dict[Pattern, tuple[tuple[Cause, float], ...]] = {
    Pattern.JUMP: JUMP_CAUSES,
    Pattern.EXPONENTIAL: ((Cause.LEARNING_RATE, 0.6), (Cause.ACCUMULATION, 0.15), (Cause.MOMENTUM, 0.1)),
    Pattern.OSCILLATING: ((Cause.LEARNING_RATE, 0.4), (Cause.OPTIMIZER_STATE, 0.25), (Cause.DRIFT, 0.2)),
}


def _slow_rise(view: RunView, loss: LossCurve) -> Symptom | None:
    least = max(
        view.thresholds.slow_rise, view.thresholds.rise_to_noise * loss.noise, 1.5 * MIN_SIGMAS * loss.level_error
    )
    if loss.rise <= least or len(loss) < 20 or loss.best_at >= 0.8 * len(loss):
        return None
    step = float(loss.steps[loss.best_at])
    lowest, last = format_number(float(loss.raw[loss.best_at])), format_number(float(np.median(loss.raw[-3:])))
    more = float(np.expm1(loss.rise))
    return Symptom(
        verdict=RunHealth.WARNING,
        pattern=Pattern.NONE,
        sentence=f"The loss was lowest at {view.at_step(step)} and has risen by {more:.0%} since.",
        onset=step,
        causes=((Cause.DRIFT, 0.4), (Cause.LEARNING_RATE, 0.35), (Cause.SCHEDULE, 0.2)),
        evidence=(f"{lowest} then, {last} at the end",),
    )

"""What the judge of live runs says of a log with loss and norm of every update, as it would have said it then."""

from __future__ import annotations

import numpy as np

from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.logs.course import RunCurves, Floats, Series
from surefoot.records import NAN, Cause, Diagnosis, StepMetrics, Verdict

BEFORE = 1000
"""Updates before the onset that the judge is shown, to know what was normal."""
AFTER = 40
"""Updates from the onset on within which it has to speak."""
LEAST = 60
"""Updates before the onset below which it cannot know what was normal."""


def replay_live_judge(course: RunCurves, onset: float | None) -> list[Diagnosis]:
    """The causes that the judge names around the onset, the surest first; none where the log is not of its kind."""
    loss = course.loss
    measured = len(course.grad_norm) >= LEAST and bool(np.any(course.grad_norm.values != 0))
    if onset is None or course.unit != "step" or not measured or not _every_update(loss.steps):
        return []
    at = int(np.searchsorted(loss.steps, onset))
    if at < LEAST:
        return []
    first, last = max(0, at - BEFORE), min(len(loss), at + AFTER)
    steps = loss.steps[first:last]
    losses = loss.values[first:last]
    norms, rates, scales = (_beside(trace, steps) for trace in (course.grad_norm, course.lr, course.loss_scale))
    judge = Judge(Policy(observe=True))
    told: list[Diagnosis] = []
    for number in range(len(steps)):
        row = _row(number, float(losses[number]), float(norms[number]), float(rates[number]), float(scales[number]))
        events = judge.update(row)
        if number >= at - first - 2:
            told += [event for event in events if isinstance(event, Diagnosis) and event.cause is not Cause.UNKNOWN]
    return sorted(told, key=lambda one: -one.confidence)


def _every_update(steps: Floats) -> bool:
    return len(steps) > LEAST and float(np.median(np.diff(steps))) == 1.0


def _beside(trace: Series, steps: Floats) -> Floats:
    """A trace's values at the given steps; NaN where it has none within a step."""
    if not len(trace):
        return np.full(len(steps), NAN)
    index = np.clip(np.searchsorted(trace.steps, steps, side="right") - 1, 0, None)
    near = np.abs(steps - trace.steps[index]) <= 1
    return np.where(near, trace.values[index], NAN)


def _row(number: int, loss: float, norm: float, rate: float, scale: float) -> StepMetrics:
    bad = not np.isfinite(loss) or not np.isfinite(norm)
    return StepMetrics(
        step=number,
        attempt=number,
        time=float(number),
        verdict=Verdict.NONFINITE if bad else Verdict.APPLIED,
        loss=loss,
        norm=norm,
        lr=rate,
        loss_scale=scale,
    )

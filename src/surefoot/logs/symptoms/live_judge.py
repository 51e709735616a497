"""What surefoot's live judge says about a log: recorded during the run, or replayed over a log of every update."""

from __future__ import annotations

import numpy as np

from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.logs.run_curves import Floats, RunCurves, Series
from surefoot.records import NAN, Cause, Diagnosis, StepMetrics, Verdict

UPDATES_BEFORE = 1000
"""Updates before the onset replayed as baseline."""
UPDATES_AFTER = 40
"""Updates from the onset on within which a diagnosis counts."""
MIN_UPDATES_BEFORE = 60
"""With fewer updates before the onset there is no baseline."""


def replay_live_judge(curves: RunCurves, onset: float | None) -> list[Diagnosis]:
    """Replay the updates around the onset, if all were logged; the judge's diagnoses, the most confident first."""
    loss = curves.loss
    measured = len(curves.grad_norm) >= MIN_UPDATES_BEFORE and bool(np.any(curves.grad_norm.values != 0))
    if onset is None or curves.unit != "step" or not measured or not _logs_every_update(loss.steps):
        return []
    at = int(np.searchsorted(loss.steps, onset))
    if at < MIN_UPDATES_BEFORE:
        return []
    first, last = max(0, at - UPDATES_BEFORE), min(len(loss), at + UPDATES_AFTER)
    steps = loss.steps[first:last]
    losses = loss.values[first:last]
    norms, rates, scales = (_values_at(series, steps) for series in (curves.grad_norm, curves.lr, curves.loss_scale))
    judge = Judge(Policy(observe=True))
    judged: list[Diagnosis] = []
    for number in range(len(steps)):
        row = _step_metrics(
            number, float(losses[number]), float(norms[number]), float(rates[number]), float(scales[number])
        )
        events = judge.update(row)
        if number >= at - first - 2:
            judged += [event for event in events if isinstance(event, Diagnosis) and event.cause is not Cause.UNKNOWN]
    return sorted(judged, key=lambda event: -event.confidence)


def _logs_every_update(steps: Floats) -> bool:
    return len(steps) > MIN_UPDATES_BEFORE and float(np.median(np.diff(steps))) == 1.0


def _values_at(series: Series, steps: Floats) -> Floats:
    """A series' values at the given steps; NaN where it has none within one step."""
    if not len(series):
        return np.full(len(steps), NAN)
    index = np.clip(np.searchsorted(series.steps, steps, side="right") - 1, 0, None)
    near = np.abs(steps - series.steps[index]) <= 1
    return np.where(near, series.values[index], NAN)


def _step_metrics(number: int, loss: float, norm: float, rate: float, scale: float) -> StepMetrics:
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

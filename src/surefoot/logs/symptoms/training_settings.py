"""Settings that show in the curves: an lr of 0, constant clipping, a bad resume, loss-scale overflow."""

from __future__ import annotations

import numpy as np

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.run_curves import Series
from surefoot.logs.symptoms.symptom import LOG_2, RunView, Symptom, format_number
from surefoot.records import Cause, Pattern

CLIPPED_SHARE = 0.5
"""Share of equal norms from which their value is the clip threshold."""
MIN_VALUES = 10
"""Fewer values are not judged."""


def find_zero_lr(view: RunView) -> Symptom | None:
    """A learning rate of 0 in the whole log, or from its first half to its end."""
    rate = view.curves.lr
    finite = rate.values[np.isfinite(rate.values)]
    if len(finite) < MIN_VALUES or finite[len(finite) // 2 :].any():
        return None
    moved = np.flatnonzero(rate.values > 0)
    onset = float(rate.steps[moved[-1] + 1]) if len(moved) else float(rate.steps[0])
    since = f"since {view.at_step(onset)}" if len(moved) else "in the whole log"
    return Symptom(
        verdict=RunHealth.WARNING,
        pattern=Pattern.PLATEAU,
        sentence=f"The learning rate is 0 {since}: the weights do not move.",
        onset=onset,
        causes=((Cause.NOT_UPDATING, 0.5), (Cause.SCHEDULE, 0.5)),
        evidence=(f"{len(finite):,} learning rates were logged, the last {format_number(float(finite[-1]))}",),
        advice=("Check the schedule's total number of steps, and that it counts updates and not micro-batches.",),
    )


def find_constant_clipping(view: RunView) -> Symptom | None:
    """A logged norm that is nearly constant: clipping acts on every step, like a smaller lr."""
    norms = view.curves.grad_norm.values
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if len(norms) < MIN_VALUES:
        return None
    values, counts = np.unique(np.round(norms, 3), return_counts=True)
    share = float(counts.max() / len(norms))
    if share < CLIPPED_SHARE or len(values) == 1 == len(norms):
        return None
    pinned = float(values[int(np.argmax(counts))])
    if pinned <= 0 or (norms > pinned * 1.01).mean() > 0.1:
        return None
    return Symptom(
        verdict=RunHealth.HEALTHY,
        pattern=Pattern.NONE,
        sentence=f"The gradient norm is {format_number(pinned)} in {share:.0%} of the log: clipping acts all the time.",
        onset=None,
        causes=((Cause.EXPLODING_GRADIENT, 0.2),),
    )


def find_resume_jump(view: RunView) -> Symptom | None:
    """A loss that is higher after a resume than it was at that step before."""
    if not any("goes back" in note for note in view.curves.notes) or view.loss is None:
        return None
    moves = np.diff(view.loss.level)
    if not len(moves) or float(moves.max()) < LOG_2 / 2:
        return None
    at = int(np.argmax(moves)) + 1
    return Symptom(
        verdict=RunHealth.HEALTHY,
        pattern=Pattern.NONE,
        sentence=f"The run was resumed, and its loss is higher at {view.at_step(float(view.loss.steps[at]))}.",
        onset=float(view.loss.steps[at]),
        causes=((Cause.OPTIMIZER_STATE, 0.4), (Cause.SCHEDULE, 0.3)),
        advice=("Check that a resume loads the optimizer, the schedule and the position in the data.",),
    )


MIN_HALVINGS = 2
"""Consecutive halvings that are more than the scaler's normal search."""
MIN_SKIPPED_SHARE = 0.01
"""Share of skipped updates that is worth a warning."""
COLLAPSED_SCALE = 1.0
"""Below this the loss scale no longer helps: gradients overflow by themselves."""


def find_overflow_skips(view: RunView) -> Symptom | None:
    scale = view.curves.loss_scale
    skipped = view.curves.others.get("skipped")
    halvings, step = _longest_halving_streak(scale)
    count, first = _count_skipped(skipped)
    points = max(len(view.curves.loss), 1)
    low = len(scale) > 0 and 0 < float(scale.values[-1]) < COLLAPSED_SCALE and halvings >= MIN_HALVINGS
    if halvings < MIN_HALVINGS and count < max(MIN_HALVINGS, MIN_SKIPPED_SHARE * points):
        return None
    evidence: list[str] = []
    if halvings:
        lowest = format_number(float(np.nanmin(scale.values)))
        evidence.append(
            f"the loss scale fell {halvings} times in a row, from {format_number(float(scale.values[0]))} to {lowest}"
        )
    if count:
        evidence.append(f"{count:,.0f} updates were skipped")
    onset = step if step is not None else first
    where = f" from {view.at_step(onset)} on" if onset is not None else ""
    sentence = (
        "The loss scale has collapsed" if low else "Float16 overflows: the loss scale was halved and updates skipped"
    )
    return Symptom(
        verdict=RunHealth.FAILED if low else RunHealth.WARNING,
        pattern=Pattern.OVERFLOW_SKIPS,
        sentence=f"{sentence}{where}.",
        onset=onset,
        causes=((Cause.PRECISION_OVERFLOW, 0.8),),
        evidence=tuple(evidence),
        advice=("A few skips in the first steps are the scale finding its place; later ones are not.",),
    )


def _longest_halving_streak(scale: Series) -> tuple[int, float | None]:
    """The longest streak of falls without a rise, and the step where it began."""
    values = scale.values
    moves = np.flatnonzero(np.diff(values) != 0) + 1 if len(values) else np.empty(0, int)
    longest, began, run = 0, None, 0
    start = 0
    for at in moves:
        if values[at] < values[at - 1]:
            run += 1
            start = int(at) if run == 1 else start
            if run > longest:
                longest, began = run, float(scale.steps[start])
        else:
            run = 0
    return longest, began


def _count_skipped(skipped: Series | None) -> tuple[float, float | None]:
    """The number of skipped updates, logged as a running count or per record, and the first such step."""
    if skipped is None:
        return 0.0, None
    values = np.where(np.isfinite(skipped.values), skipped.values, 0.0)
    if not values.any():
        return 0.0, None
    rising = len(values) > 1 and bool(np.all(np.diff(values) >= 0)) and values[-1] > 0
    total = float(values[-1]) if rising and values.max() > 1 else float(values.sum())
    return total, float(skipped.steps[int(np.flatnonzero(values)[0])])

"""Settings that show in the numbers: a rate of 0, a norm pinned at the clip threshold, a resume that jumps."""

from __future__ import annotations

import numpy as np

from surefoot.logs.answer import RunHealth
from surefoot.logs.judging.signs.base import LOG_2, RunView, Symptom, format_number
from surefoot.records import Cause, Pattern

PINNED = 0.5
"""Share of the norms with one and the same value from which it is the clip threshold and not the norm."""
FEWEST = 10
"""Values below which nothing is said."""


def find_zero_lr(view: RunView) -> Symptom | None:
    """A learning rate that is 0 in the whole log, or from its first half to its end."""
    rate = view.curves.lr
    finite = rate.values[np.isfinite(rate.values)]
    if len(finite) < FEWEST or finite[len(finite) // 2 :].any():
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
    """A logged norm that is nearly always the same: clipping acts on every step, as a smaller rate would."""
    norms = view.curves.grad_norm.values
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if len(norms) < FEWEST:
        return None
    values, counts = np.unique(np.round(norms, 3), return_counts=True)
    share = float(counts.max() / len(norms))
    if share < PINNED or len(values) == 1 == len(norms):
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
    """A loss that is higher after the log went back to an earlier step than it was there before."""
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

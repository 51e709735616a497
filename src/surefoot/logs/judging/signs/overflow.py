"""A loss scale that halves again and again, and the updates that were skipped for it."""

from __future__ import annotations

import numpy as np

from surefoot.logs.answer import RunHealth
from surefoot.logs.course import Series
from surefoot.logs.judging.signs.base import RunView, Symptom, format_number
from surefoot.records import Cause, Pattern

IN_A_ROW = 2
"""Halvings, with no rise between them, that are more than the scale feeling its way."""
SHARE = 0.01
"""Share of skipped updates from which they are worth a word."""
COLLAPSED = 1.0
"""A scale this low no longer lifts anything: gradients overflow by themselves."""


def find_overflow_skips(view: RunView) -> Symptom | None:
    scale = view.curves.loss_scale
    skipped = view.curves.others.get("skipped")
    halvings, step = _streak(scale)
    count, first = _skips(skipped)
    points = max(len(view.curves.loss), 1)
    low = len(scale) > 0 and 0 < float(scale.values[-1]) < COLLAPSED and halvings >= IN_A_ROW
    if halvings < IN_A_ROW and count < max(IN_A_ROW, SHARE * points):
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
    told = "The loss scale has collapsed" if low else "Float16 overflows: the loss scale was halved and updates skipped"
    return Symptom(
        verdict=RunHealth.FAILED if low else RunHealth.WARNING,
        pattern=Pattern.OVERFLOW_SKIPS,
        sentence=f"{told}{where}.",
        onset=onset,
        causes=((Cause.PRECISION_OVERFLOW, 0.8),),
        evidence=tuple(evidence),
        advice=("A few skips in the first steps are the scale finding its place; later ones are not.",),
    )


def _streak(scale: Series) -> tuple[int, float | None]:
    """The longest row of falls with no rise between them, and where it began."""
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


def _skips(skipped: Series | None) -> tuple[float, float | None]:
    """How many updates were skipped: a running count, or one a record."""
    if skipped is None:
        return 0.0, None
    values = np.where(np.isfinite(skipped.values), skipped.values, 0.0)
    if not values.any():
        return 0.0, None
    rising = len(values) > 1 and bool(np.all(np.diff(values) >= 0)) and values[-1] > 0
    total = float(values[-1]) if rising and values.max() > 1 else float(values.sum())
    return total, float(skipped.steps[int(np.flatnonzero(values)[0])])

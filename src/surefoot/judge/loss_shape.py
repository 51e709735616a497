"""The pattern of a loss that blew up: a single jump, exponential growth, or widening oscillation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from surefoot.judge.thresholds import CLEAR_RATIO, DOUBLE_RATIO, REPEAT_COUNT, SMALL_FRACTION, TREND_ROWS
from surefoot.records import Pattern


def shape(losses: Sequence[float]) -> Pattern:
    """The pattern in which a loss blew up; `Pattern.NONE` when it did not.

    >>> shape([2.1, 2.0, 1.9, 8734.5, math.nan])
    <Pattern.JUMP: 'jump'>
    """
    finite = _finite_prefix(losses)
    tail = finite[-TREND_ROWS:]
    died = len(finite) < len(losses)
    if len(tail) < 3:
        return Pattern.NONFINITE if died else Pattern.NONE
    if _widening(tail):
        return Pattern.OSCILLATING
    rise = _rise(tail)
    if rise is None:
        return Pattern.NONFINITE if died else Pattern.NONE
    steps = [max(b - a, 0.0) for a, b in itertools.pairwise(rise)]
    at_once = max(steps) / sum(steps)
    # A jump is most of the whole rise in one step.
    return Pattern.EXPONENTIAL if at_once < 1 / CLEAR_RATIO and len(steps) > 2 else Pattern.JUMP


def _finite_prefix(losses: Sequence[float]) -> list[float]:
    """The values before the first non-finite one."""
    finite: list[float] = []
    for loss in losses:
        if not math.isfinite(loss):
            break
        finite.append(loss)
    return finite


def _rise(values: Sequence[float]) -> list[float] | None:
    """The log losses from the last low point to the highest point, if the loss blew up between them."""
    top = max(range(len(values)), key=values.__getitem__)
    low = min(range(top + 1), key=lambda i: (values[i], -i))
    height = values[top] - min(0.0, values[low])
    floor = max(values[low] - min(0.0, values[low]), 1e-3 * height, 1e-30)
    if top == low or height < DOUBLE_RATIO * floor:
        return None
    shift = -min(0.0, values[low])
    return [math.log(max(v + shift, floor)) for v in values[low : top + 1]]


def _widening(values: Sequence[float]) -> bool:
    """Whether the values end in widening swings that are larger than any other change."""
    moves = [b - a for a, b in itertools.pairwise(values)]
    sizes: list[float] = []
    for k in range(len(moves) - 1, -1, -1):
        if sizes and moves[k] * moves[k + 1] >= 0:
            break
        sizes.insert(0, abs(moves[k]))
    while sizes and sizes[0] < SMALL_FRACTION * max(sizes):
        sizes.pop(0)  # noise before it goes up and down too
    if len(sizes) <= REPEAT_COUNT or max(sizes) < max(map(abs, moves)):
        return False
    swinging = values[-len(sizes) - 1 :]
    if max(swinging) - min(0.0, *swinging) < DOUBLE_RATIO * abs(min(swinging)):
        return False
    half = len(sizes) // 2
    first, last = sum(sizes[:half]) / half, sum(sizes[-half:]) / half
    return last > CLEAR_RATIO * first and max(sizes) < 1 / CLEAR_RATIO * sum(sizes)

"""The three patterns of divergence: sequences of the design notes, and random variations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.judge.loss_shape import shape
from surefoot.records import Pattern

NAN = math.nan
JUMP, EXPONENTIAL, OSCILLATING = Pattern.JUMP, Pattern.EXPONENTIAL, Pattern.OSCILLATING


@pytest.mark.parametrize(
    ("losses", "pattern"),
    [
        ([2.1, 2.0, 1.9, 8734.5, NAN], JUMP),
        ([2.1, 2.3, 2.8, 4.5, 12.3, 89.7, NAN], EXPONENTIAL),
        ([2.1, 1.8, 2.5, 1.6, 3.2, 1.4, 5.8, NAN], OSCILLATING),
        ([1.8, 1.7, 1.6, 1.5, 1.4, 87234.5, NAN], JUMP),
        ([2.1, 2.2, 2.5, 3.1, 4.8, 9.2, 23.5, 156.7, NAN], EXPONENTIAL),
        ([2.0, 1.8, 2.2, 1.6, 2.5, 1.4, 3.2, 1.2, 5.8, NAN], OSCILLATING),
        ([2.1, 2.0, 1.9, NAN], Pattern.NONFINITE),
        ([NAN], Pattern.NONFINITE),
        ([2.1, 2.0, 1.95, 1.97, 1.8], Pattern.NONE),
        ([], Pattern.NONE),
    ],
)
def test_patterns_of_the_sequences_in_the_notes(losses: list[float], pattern: Pattern) -> None:
    assert shape(losses) is pattern


calm = st.lists(st.floats(-0.02, 0.02), min_size=3, max_size=40)
"""Relative noise of the losses before the onset."""
scale = st.floats(-6, 6).map(lambda power: 10.0**power)
dies = st.booleans()


def before(noise: list[float], level: float) -> list[float]:
    """A slowly falling loss with noise."""
    return [level * (1 - 0.1 * k / len(noise)) * (1 + n) for k, n in enumerate(noise)]


@settings(max_examples=200)
@given(calm, scale, dies, st.floats(3, 1e5), st.lists(st.floats(-0.1, 0.1), max_size=5))
def test_a_jump(noise: list[float], level: float, died: bool, height: float, after: list[float]) -> None:
    losses = before(noise, level)
    losses += [losses[-1] * height * (1 + n) for n in (0.0, *after)]
    assert shape(losses + [NAN] * died) is JUMP


@settings(max_examples=200)
@given(calm, scale, dies, st.floats(1.25, 2.5), st.integers(7, 14), st.data())
def test_growth(noise: list[float], level: float, died: bool, pace: float, length: int, data: st.DataObject) -> None:
    losses = before(noise, level)
    shaken = data.draw(st.lists(st.floats(-0.04, 0.04), min_size=length, max_size=length))
    losses += [losses[-1] * pace ** (k + 1) * (1 + n) for k, n in enumerate(shaken)]
    assert shape(losses + [NAN] * died) is EXPONENTIAL


@settings(max_examples=200)
@given(calm, scale, dies, st.floats(1.3, 1.8), st.integers(7, 12), st.data())
def test_oscillation(
    noise: list[float], level: float, died: bool, pace: float, length: int, data: st.DataObject
) -> None:
    losses = before(noise, level)
    shaken = data.draw(st.lists(st.floats(-0.04, 0.04), min_size=length, max_size=length))
    centre = losses[-1]
    for k, n in enumerate(shaken):
        swing = 0.25 * pace**k
        up = centre * (1 + swing) if k % 2 == 0 else centre / (1 + swing / 2)
        losses.append(up * (1 + n))
    assert shape(losses + [NAN] * died) is OSCILLATING


@settings(max_examples=200)
@given(calm, scale)
def test_healthy_loss_has_no_pattern(noise: list[float], level: float) -> None:
    assert shape(before(noise, level)) is Pattern.NONE

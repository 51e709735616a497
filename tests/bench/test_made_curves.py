"""Synthetic curves: deterministic, harmed after their onset, and half of them held back."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.made_accuracy import prefix_grid, score
from benchmarks.made_curves import KINDS, LENGTHS, make_curve


def test_curves_are_deterministic() -> None:
    first, second = make_curve("jump-stays", 3000), make_curve("jump-stays", 3000)
    np.testing.assert_array_equal(first.loss, second.loss)
    assert first.onset == second.onset


def test_about_half_of_the_curves_are_held_back() -> None:
    held_back = [make_curve(kind, rows).held_back for kind in KINDS for rows in LENGTHS[:2]]
    assert 0.3 < np.mean(held_back) < 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_healthy_or_harmed_after_its_onset(kind: str) -> None:
    curve = make_curve(kind, 3000, 7)
    if curve.healthy:
        assert not curve.harmed_at(3000)
        assert np.isfinite(curve.loss).all()
    else:
        assert curve.onset is not None
        assert not curve.harmed_at(curve.onset)
        assert any(curve.onset < rows for rows in prefix_grid(curve))


def test_jump_is_scored_at_every_prefix() -> None:
    judged = score(make_curve("small-jump", 3000, 7))
    assert judged.right
    assert judged.missed == ()
    assert judged.onset_error is not None
    assert judged.onset_error <= 5

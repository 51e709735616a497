"""The made-up curves are what they claim: the same every time, broken where they say, half of them held back."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.made_accuracy import prefix_grid, score
from benchmarks.made_curves import KINDS, LENGTHS, make_curve


def test_a_curve_is_the_same_every_time() -> None:
    one, two = make_curve("jump-stays", 3000), make_curve("jump-stays", 3000)
    np.testing.assert_array_equal(one.loss, two.loss)
    assert one.onset == two.onset


def test_about_half_is_held_back() -> None:
    held = [make_curve(kind, rows).held_back for kind in KINDS for rows in LENGTHS[:2]]
    assert 0.3 < np.mean(held) < 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_healthy_or_broken_from_a_row_on(kind: str) -> None:
    curve = make_curve(kind, 3000, 7)
    if curve.healthy:
        assert not curve.harmed_at(3000)
        assert np.isfinite(curve.loss).all()
    else:
        assert curve.onset is not None
        assert not curve.harmed_at(curve.onset)
        assert any(curve.onset < rows for rows in prefix_grid(curve))


def test_a_jump_is_scored_at_every_prefix() -> None:
    judged = score(make_curve("small-jump", 3000, 7))
    assert judged.right
    assert judged.missed == ()
    assert judged.onset_error is not None
    assert judged.onset_error <= 5

"""Tensors against their own past, and weights that do not move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from made_rows import NAMES, Bench, Source, layers

from surefoot.judge.detectors.gradients import DeadUnits, ExplodingGrads, VanishingGrads
from surefoot.judge.detectors.weights import FrozenWeights
from surefoot.judge.thresholds import RECENT_ROWS, TREND_ROWS
from surefoot.records import LAYER_STATS, Finding

Ours = ExplodingGrads | VanishingGrads | DeadUnits
WHICH = (1, 3)
TROUBLE: dict[str, tuple[type[Ours], dict[str, Any]]] = {
    "exploding": (ExplodingGrads, {"swells": 800.0}),
    "fading": (VanishingGrads, {"swells": 1e-3}),
    "next to nothing": (VanishingGrads, {"swells": 1e-10}),
    "dead": (DeadUnits, {"zeros": 0.9}),
}


def some(start: int, count: int, **changes: Any) -> list[np.ndarray]:
    return [layers(start + k, which=WHICH, **changes) for k in range(count)]


def begun(kind: type[Ours]) -> tuple[Source, Callable[[Sequence[np.ndarray]], list[Finding]]]:
    bench, source = Bench(), Source(3)
    detector = kind(bench.normal, NAMES)
    assert bench.said(detector, source.rows(300), some(0, 300)) == [], "ordinary tensors are no news"
    return source, lambda tensors: bench.said(detector, source.rows(len(tensors)), tensors)


@pytest.mark.parametrize("name", TROUBLE)
def test_a_layer_in_trouble_is_told_with_its_name_once_and_again_after_it_was_over(name: str) -> None:
    kind, change = TROUBLE[name]
    source, said = begun(kind)
    at = source.attempt
    (found,) = said(some(500, 30, **change))
    assert found.evidence["layers"] == [NAMES[k] for k in WHICH]
    assert found.evidence["share"] == pytest.approx(2 / len(NAMES))
    assert NAMES[1] in found.detail
    assert RECENT_ROWS - 1 <= found.attempt - at < 20, "no accident, and soon"
    assert said(some(600, 30)) == []
    assert len(said(some(700, 30, **change))) == 1


@pytest.mark.parametrize("name", TROUBLE)
def test_two_odd_rows_are_an_accident(name: str) -> None:
    kind, change = TROUBLE[name]
    _, said = begun(kind)
    assert said([*some(500, 2, **change), *some(600, 20)]) == []


def test_a_layer_that_fell_silent_has_not_vanished() -> None:
    _, said = begun(VanishingGrads)
    assert said(some(500, 30, swells=1e-3, zeros=0.95)) == []


def test_nothing_is_said_before_a_layer_has_a_past() -> None:
    bench, source = Bench(), Source(3)
    tensors = [*some(0, TREND_ROWS // 4), *some(100, TREND_ROWS // 4, swells=800.0)]
    assert bench.said(ExplodingGrads(bench.normal, NAMES), source.rows(len(tensors)), tensors) == []


def test_an_explosion_beyond_all_bounds_is_severe() -> None:
    _, said = begun(ExplodingGrads)
    (found,) = said(some(500, 20, swells=1e5))
    assert found.detail.startswith("severe")


def test_other_tensors_than_before_begin_a_new_past() -> None:
    bench, source = Bench(), Source(3)
    detector = ExplodingGrads(bench.normal, NAMES)
    bench.said(detector, source.rows(100), some(0, 100))
    assert bench.said(detector, source.rows(60), [layers(k, 12, swells=1e4) for k in range(60)]) == []


def still(bench: Bench, *, owned: int | None = None, adaptive: bool = True) -> FrozenWeights:
    return FrozenWeights(NAMES, owned, bench.normal, adaptive=adaptive)


def test_tensors_that_no_optimizer_holds_are_told_once() -> None:
    bench = Bench()
    (found,) = bench.said(still(bench, owned=5), Source(0).rows(50))
    assert found.attempt == 0
    assert found.evidence["layers"] == list(NAMES[5:])


def test_tensors_that_lost_their_gradient_are_told() -> None:
    bench, source = Bench(), Source(0)
    detector = still(bench)

    def without(start: int, count: int) -> list[np.ndarray]:
        made = some(start, count)
        for tensors in made:
            tensors[2] = 0.0
            tensors[2, LAYER_STATS.index("nonfinite")] = -1.0
        return made

    assert bench.said(detector, source.rows(60), some(0, 60)) == []
    assert bench.said(detector, source.rows(RECENT_ROWS - 2), without(100, RECENT_ROWS - 2)) == [], (
        "a branch may rest for a while"
    )
    assert bench.said(detector, source.rows(10), some(200, 10)) == []
    (found,) = bench.said(detector, source.rows(20), without(300, 20))
    assert found.evidence["layers"] == [NAMES[2]]
    assert bench.said(detector, source.rows(10), some(400, 10)) == []
    assert len(bench.said(detector, source.rows(20), without(500, 20))) == 1


def test_tensors_that_never_had_a_gradient_are_no_news() -> None:
    bench, source = Bench(), Source(0)
    tensors = some(0, 60)
    for made in tensors:
        made[2] = 0.0
        made[2, LAYER_STATS.index("nonfinite")] = -1.0
    assert bench.said(still(bench), source.rows(60), tensors) == []


@pytest.mark.parametrize("adaptive", [True, False])
def test_updates_far_smaller_than_the_rate_explains_are_told(adaptive: bool) -> None:
    bench, source = Bench(), Source(0)
    detector = still(bench, adaptive=adaptive)
    rng = np.random.default_rng(1)

    def moving(count: int, lr: float = 1e-3, share: float = 1.0) -> list[Finding]:
        """Rows of which every tenth tells how far the weights moved."""
        sizes = [share * lr * float(np.exp(0.3 * rng.normal())) if k % 10 == 0 else np.nan for k in range(count)]
        return bench.said(detector, [source.row(lr=lr, update_ratio=size) for size in sizes])

    assert moving(300) == []
    assert moving(100, lr=1e-5) == [], "that is what the rate explains"
    assert moving(100) == []
    (found,) = moving(100, share=1e-3)
    assert found.evidence["smaller"] > 100
    assert moving(100) == []
    assert len(moving(100, share=1e-3)) == 1

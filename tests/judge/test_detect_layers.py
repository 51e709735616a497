"""Detectors that compare each tensor with its own baseline, and detectors of frozen weights."""

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
    "vanishing": (VanishingGrads, {"swells": 1e-3}),
    "almost zero": (VanishingGrads, {"swells": 1e-10}),
    "dead": (DeadUnits, {"zeros": 0.9}),
}


def some(start: int, count: int, **changes: Any) -> list[np.ndarray]:
    return [layers(start + k, which=WHICH, **changes) for k in range(count)]


def begun(kind: type[Ours]) -> tuple[Source, Callable[[Sequence[np.ndarray]], list[Finding]]]:
    bench, source = Bench(), Source(3)
    detector = kind(bench.normal, NAMES)
    assert bench.findings(detector, source.rows(300), some(0, 300)) == [], "ordinary tensors give no finding"
    return source, lambda tensors: bench.findings(detector, source.rows(len(tensors)), tensors)


@pytest.mark.parametrize("name", TROUBLE)
def test_bad_layer_is_named_once_and_again_after_recovery(name: str) -> None:
    kind, change = TROUBLE[name]
    source, detect = begun(kind)
    at = source.attempt
    (finding,) = detect(some(500, 30, **change))
    assert finding.evidence["layers"] == [NAMES[k] for k in WHICH]
    assert finding.evidence["share"] == pytest.approx(2 / len(NAMES))
    assert NAMES[1] in finding.detail
    assert RECENT_ROWS - 1 <= finding.attempt - at < 20, "after a few rows, and soon"
    assert detect(some(600, 30)) == []
    assert len(detect(some(700, 30, **change))) == 1


def test_finding_says_what_it_means_for_a_part_of_the_model() -> None:
    """Only the vision encoder explodes: its images are not normalised."""
    names = [f"vision.conv{k}.weight" if k in WHICH else f"language.h.{k}.mlp.weight" for k in range(len(NAMES))]
    bench, source = Bench(), Source(3)
    detector = ExplodingGrads(bench.normal, names)
    tensors = [*some(0, 300), *some(500, 30, swells=800.0)]
    (finding,) = bench.findings(detector, source.rows(330), tensors)
    assert "images are not normalised" in finding.detail


@pytest.mark.parametrize("name", TROUBLE)
def test_two_odd_rows_give_no_finding(name: str) -> None:
    kind, change = TROUBLE[name]
    _, detect = begun(kind)
    assert detect([*some(500, 2, **change), *some(600, 20)]) == []


def test_layer_of_mostly_zero_gradients_is_not_vanishing() -> None:
    _, detect = begun(VanishingGrads)
    assert detect(some(500, 30, swells=1e-3, zeros=0.95)) == []


def test_no_finding_before_a_layer_has_a_baseline() -> None:
    bench, source = Bench(), Source(3)
    tensors = [*some(0, TREND_ROWS // 4), *some(100, TREND_ROWS // 4, swells=800.0)]
    assert bench.findings(ExplodingGrads(bench.normal, NAMES), source.rows(len(tensors)), tensors) == []


def test_huge_explosion_is_severe() -> None:
    _, detect = begun(ExplodingGrads)
    (finding,) = detect(some(500, 20, swells=1e5))
    assert finding.detail.startswith("severe")


def test_changed_tensors_start_a_new_baseline() -> None:
    bench, source = Bench(), Source(3)
    detector = ExplodingGrads(bench.normal, NAMES)
    bench.findings(detector, source.rows(100), some(0, 100))
    assert bench.findings(detector, source.rows(60), [layers(k, 12, swells=1e4) for k in range(60)]) == []


def still(bench: Bench, *, owned: int | None = None, adaptive: bool = True) -> FrozenWeights:
    return FrozenWeights(NAMES, owned, bench.normal, adaptive=adaptive)


def test_tensors_without_optimizer_are_found_once() -> None:
    bench = Bench()
    (finding,) = bench.findings(still(bench, owned=5), Source(0).rows(50))
    assert finding.attempt == 0
    assert finding.evidence["layers"] == list(NAMES[5:])


def test_tensors_that_lost_their_gradient_are_found() -> None:
    bench, source = Bench(), Source(0)
    detector = still(bench)

    def without(start: int, count: int) -> list[np.ndarray]:
        made = some(start, count)
        for tensors in made:
            tensors[2] = 0.0
            tensors[2, LAYER_STATS.index("nonfinite")] = -1.0
        return made

    assert bench.findings(detector, source.rows(60), some(0, 60)) == []
    assert bench.findings(detector, source.rows(RECENT_ROWS - 2), without(100, RECENT_ROWS - 2)) == [], (
        "a branch may be unused for a while"
    )
    assert bench.findings(detector, source.rows(10), some(200, 10)) == []
    (finding,) = bench.findings(detector, source.rows(20), without(300, 20))
    assert finding.evidence["layers"] == [NAMES[2]]
    assert bench.findings(detector, source.rows(10), some(400, 10)) == []
    assert len(bench.findings(detector, source.rows(20), without(500, 20))) == 1


def test_tensors_that_never_had_a_gradient_give_no_finding() -> None:
    bench, source = Bench(), Source(0)
    tensors = some(0, 60)
    for made in tensors:
        made[2] = 0.0
        made[2, LAYER_STATS.index("nonfinite")] = -1.0
    assert bench.findings(still(bench), source.rows(60), tensors) == []


@pytest.mark.parametrize("adaptive", [True, False])
def test_updates_too_small_for_the_lr_are_found(adaptive: bool) -> None:
    bench, source = Bench(), Source(0)
    detector = still(bench, adaptive=adaptive)
    rng = np.random.default_rng(1)

    def moving(count: int, lr: float = 1e-3, share: float = 1.0) -> list[Finding]:
        """Rows of which every tenth has an update ratio."""
        sizes = [share * lr * float(np.exp(0.3 * rng.normal())) if k % 10 == 0 else np.nan for k in range(count)]
        return bench.findings(detector, [source.row(lr=lr, update_ratio=size) for size in sizes])

    assert moving(300) == []
    assert moving(100, lr=1e-5) == [], "explained by the lower lr"
    assert moving(100) == []
    (finding,) = moving(100, share=1e-3)
    assert finding.evidence["smaller"] > 100
    assert moving(100) == []
    assert len(moving(100, share=1e-3)) == 1

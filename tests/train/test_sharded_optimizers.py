from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def results(two_processes: Callable[[Path], list[dict[str, Any]]]) -> dict[str, Any]:
    return two_processes(Path(__file__).with_name("two_rank_sharded_optimizers.py"))[0]


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "lars"])
def test_sharded_training_equals_unsharded_training(results: dict[str, Any], name: str) -> None:
    assert results[name] < 1e-3


def test_sharded_muon_differs_only_by_bfloat16_rounding(results: dict[str, Any]) -> None:
    assert results["muon"] < 0.05


@pytest.mark.parametrize("name", ["lamb", "rprop"])
def test_optimizers_that_cannot_be_sharded_are_refused_with_advice(results: dict[str, Any], name: str) -> None:
    assert "cannot step on sharded weights. Use parallel.strategy=data, or another optimizer" in results[name]

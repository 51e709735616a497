from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def told(two_processes: Callable[[Path], list[dict[str, Any]]]) -> dict[str, Any]:
    return two_processes(Path(__file__).with_name("two_sharded.py"))[0]


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "lars"])
def test_shards_are_trained_as_the_whole_model_is(told: dict[str, Any], name: str) -> None:
    assert told[name] < 1e-3


def test_muon_on_shards_differs_by_its_rounding_to_bfloat16_only(told: dict[str, Any]) -> None:
    assert told["muon"] < 0.05


@pytest.mark.parametrize("name", ["lamb", "rprop"])
def test_what_cannot_step_on_shards_is_refused_with_the_way_out(told: dict[str, Any], name: str) -> None:
    assert "cannot step on sharded weights. Use parallel.strategy=data, or another optimizer" in told[name]

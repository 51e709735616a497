"""Two ranks over gloo: every parallel strategy trains like a single process, also guarded and restarted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
STRATEGIES = ("data", "zero1", "zero2", "zero3")
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax")
TOLERANCE = 5e-6
"""Tolerance of losses near 3.5 and of weights against one float32 process: the order of sums differs."""


@pytest.fixture(scope="module")
def results(two_processes: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of both ranks."""
    return two_processes(HERE / "two_sharded_ranks.py")


@pytest.fixture(scope="module")
def restarted(two_processes: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The same with torchrun restarting both ranks after one is killed."""
    return two_processes(HERE / "two_rank_restart.py", "--max-restarts", "1")


@pytest.mark.parametrize(
    "kind", [*STRATEGIES, "data compiled", "zero3 compiled", *(f"zero1 {name}" for name in OPTIMIZERS)]
)
def test_two_ranks_train_like_one_process(kind: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result[kind]["losses"] < TOLERANCE
        assert result[kind]["weights"] < TOLERANCE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_last_partial_group_of_micro_batches_makes_an_update(strategy: str, results: list[dict[str, Any]]) -> None:
    assert results[0][strategy]["steps"] == 3, "ten micro-batches in groups of four"


@pytest.mark.parametrize("kind", ["zero2 bfloat16", "zero3 bfloat16", "zero3 bfloat16 kept"])
def test_shards_gathered_in_bfloat16_stay_close(kind: str, results: list[dict[str, Any]]) -> None:
    assert 0 < results[0][kind]["losses"] < 0.01


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_synchronised_only_in_the_last_micro_batch(strategy: str, results: list[dict[str, Any]]) -> None:
    assert all(result["unsynchronised"][strategy] for result in results)


@pytest.mark.parametrize(
    "kind", ["data AdamW", "zero2 AdamW", "zero3 AdamW", *(f"zero1 {name}" for name in OPTIMIZERS)]
)
def test_nan_in_a_micro_batch_of_one_rank_is_refused_by_both(kind: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["refused"][kind] == {"unchanged": True, "verdicts": [0, 0, 0, 1, 0], "rank": [-1, -1, -1, 1, -1]}


@pytest.mark.parametrize("strategy", ["data", "zero3"])
def test_overflow_on_one_rank_lowers_the_loss_scale_of_both(strategy: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["scaled"][strategy]["unchanged"]
        assert result["scaled"][strategy]["scale"] == 512
        assert result["scaled"][strategy]["losses"] == pytest.approx(result["scaled"]["data"]["losses"], rel=2e-3)


def test_ranks_reduce_numbers_and_broadcast_objects(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["total"] == [5, 0.5]
        assert result["first"] == {"rank": 0}
        assert result["version_notes"] == [], "both ranks have the same versions"


def test_failing_rank_does_not_hang_the_other(results: list[dict[str, Any]]) -> None:
    assert all(result["shut_down"] for result in results)


def test_killed_rank_is_restarted_by_torchrun_and_the_run_resumes(
    restarted: list[dict[str, Any]],
) -> None:
    for result in restarted:
        assert result["restarts"] == 1
        assert 0 < result["first_step"] < 24, "it resumed from a checkpoint"
        assert result["same"] == {"end": True, "lr": True}, "bit-identical to a run that was never killed"

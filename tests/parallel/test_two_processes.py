"""Two processes over gloo: every way to spread a model trains as one plain process does, guarded and restarted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WAYS = ("data", "zero1", "zero2", "zero3")
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax")
CLOSE = 5e-6
"""How far losses near 3.5, and weights, may be from those of one float32 process: the order of sums differs."""


@pytest.fixture(scope="module")
def told(two_processes: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each of the two processes saw."""
    return two_processes(HERE / "two_sharded_ranks.py")


@pytest.fixture(scope="module")
def restarted(two_processes: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The same where torchrun starts the processes again when one of them dies."""
    return two_processes(HERE / "two_restarted.py", "--max-restarts", "1")


@pytest.mark.parametrize("kind", [*WAYS, "data compiled", "zero3 compiled", *(f"zero1 {name}" for name in OPTIMIZERS)])
def test_two_processes_train_as_one_does(kind: str, told: list[dict[str, Any]]) -> None:
    for seen in told:
        assert seen[kind]["losses"] < CLOSE
        assert seen[kind]["weights"] < CLOSE


@pytest.mark.parametrize("how", WAYS)
def test_the_last_group_of_micro_batches_counts_although_it_is_not_full(how: str, told: list[dict[str, Any]]) -> None:
    assert told[0][how]["steps"] == 3, "ten micro-batches in groups of four"


@pytest.mark.parametrize("kind", ["zero2 bfloat16", "zero3 bfloat16", "zero3 bfloat16 kept"])
def test_shards_gathered_in_bfloat16_stay_near(kind: str, told: list[dict[str, Any]]) -> None:
    assert 0 < told[0][kind]["losses"] < 0.01


@pytest.mark.parametrize("how", WAYS)
def test_gradients_are_synchronised_with_the_last_micro_batch_only(how: str, told: list[dict[str, Any]]) -> None:
    assert all(seen["quiet"][how] for seen in told)


@pytest.mark.parametrize(
    "kind", ["data AdamW", "zero2 AdamW", "zero3 AdamW", *(f"zero1 {name}" for name in OPTIMIZERS)]
)
def test_trouble_in_a_micro_batch_of_one_process_is_refused_by_both(kind: str, told: list[dict[str, Any]]) -> None:
    for seen in told:
        assert seen["refused"][kind] == {"held": True, "verdicts": [0, 0, 0, 1, 0], "rank": [-1, -1, -1, 1, -1]}


@pytest.mark.parametrize("how", ["data", "zero3"])
def test_an_overflow_on_one_process_lowers_the_loss_scale_of_both(how: str, told: list[dict[str, Any]]) -> None:
    for seen in told:
        assert seen["scaled"][how]["held"]
        assert seen["scaled"][how]["scale"] == 512
        assert seen["scaled"][how]["losses"] == pytest.approx(seen["scaled"]["data"]["losses"], rel=2e-3)


def test_ranks_reduce_numbers_and_broadcast_objects(told: list[dict[str, Any]]) -> None:
    for seen in told:
        assert seen["total"] == [5, 0.5]
        assert seen["first"] == {"rank": 0}
        assert seen["odd"] == [], "both run the same software"


def test_after_a_failure_nobody_waits_for_the_one_that_left(told: list[dict[str, Any]]) -> None:
    assert all(seen["left"] for seen in told)


def test_when_one_process_is_killed_torchrun_starts_both_again_and_the_run_goes_on(
    restarted: list[dict[str, Any]],
) -> None:
    for seen in restarted:
        assert seen["restarts"] == 1
        assert 0 < seen["begun"] < 24, "it went on from a checkpoint"
        assert seen["same"] == {"end": True, "lr": True}, "equal to the bit with a run that was never killed"

"""Two ranks over gloo, with DDP and FSDP2: all of them run the same trial, and none waits for another that failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.measure.cross_rank import Ranks
from surefoot.trials.conclusion import TrialResult
from surefoot.trials.data_parallel import unsupported_layout

KINDS = ("ddp", "fsdp")
STEPS = 140


@pytest.fixture(scope="module")
def results(two_processes: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of both ranks."""
    return two_processes(Path(__file__).parent / "two_rank_trials.py")


def trials_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in result["events"] if event["kind"] == "trial"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_weights_are_undone_on_both_ranks_without_losing_an_update(
    kind: str, results: list[dict[str, Any]]
) -> None:
    for result in results:
        run, fault_free = result[f"{kind} weights"], result[f"{kind} fault-free"]
        assert run["equal"], "both ranks end with the same weights"
        assert not run["lost"]
        assert run["step"] == STEPS
        assert run["loss"] < 1.1 * fault_free["loss"]
    trials = trials_of(results[0][f"{kind} weights"])
    continued = [trial for trial in trials if trial["result"] == TrialResult.CONTINUED]
    assert [trial["rank"] for trial in continued] == [0], "one rank records what all have done"
    assert continued[0]["values"]["best"] == "replay"
    assert {"nothing", "replay"} <= {branch["branch"] for branch in continued[0]["values"]["branches"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_leaves_a_healthy_run_bit_equal_on_each_rank(kind: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        tried, plain = result[f"{kind} healthy"], result[f"{kind} fault-free"]
        assert tried["bits"] == plain["bits"], "weights, buffers and optimizer state"
        assert tried["rng"] == plain["rng"]
        assert not tried["lost"]
    branches = trials_of(results[0][f"{kind} healthy"])[0]["values"]["branches"]
    assert len(branches) > 2, "the trial was run"


@pytest.mark.parametrize("kind", KINDS)
def test_where_step_fn_fails_on_one_rank_both_end_the_trial_and_train_on(
    kind: str, results: list[dict[str, Any]]
) -> None:
    for result in results:
        run = result[f"{kind} broken"]
        assert run["equal"]
        assert not run["lost"]
        assert run["loss"] < 1.3 * result[f"{kind} fault-free"]["loss"]
    first = trials_of(results[0][f"{kind} broken"])[0]
    assert first["result"] == TrialResult.NOT_RUN
    assert "rank 1: step_fn failed on a kept batch: KeyError: 'labels'" in first["detail"]
    assert "rank 0" not in first["detail"]


def test_a_step_fn_that_communicates_is_refused_before_it_does(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["ddp communicating"]["equal"]
        assert not result["ddp communicating"]["lost"]
    trials = trials_of(results[0]["ddp communicating"])
    assert trials
    assert all(trial["result"] == TrialResult.NOT_RUN for trial in trials)
    assert "communicates between ranks" in trials[0]["detail"]


def test_where_one_rank_loses_its_protection_the_other_does_not_wait_for_it(results: list[dict[str, Any]]) -> None:
    assert [result["ddp lost"]["lost"] for result in results] == [False, True]
    assert all(result["ddp lost"]["equal"] for result in results)
    trial = trials_of(results[0]["ddp lost"])[0]
    assert trial["result"] == TrialResult.NOT_RUN
    assert "a rank has lost its protection" in trial["detail"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(4, 4), "neither with DistributedDataParallel nor with FSDP2"),
        (nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), "SyncBatchNorm"),
    ],
)
def test_layouts_without_trials_are_named(model: nn.Module, reason: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = Ranks(0, 2, torch.ones(1), None, ())
    assert reason in str(unsupported_layout(model, [optimizer], ranks))

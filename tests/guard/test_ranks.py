"""Real processes over gloo: all ranks decide alike, none blocks, and ranks with different weights are made equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WORLDS = (2, 3, 4)
TENSORS = (1, 2, 3, 7)
ON_ALL = ("scaled on all", "nan on all")
ON_ONE = ("scaled on one", "nan on one", "nudged on one", "state on one")


def launched(script: str, world: int, out: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*command, str(HERE / script), str(out)],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,  # a blocked collective times out after 30 seconds
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"results-{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=WORLDS)
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank, for several world sizes."""
    return launched("ranks_damaged.py", request.param, tmp_path_factory.mktemp("damaged"))


def trial_of(results: dict[str, Any], tensors: int, damage: str) -> dict[str, Any]:
    name = f"{tensors} tensors, {damage}"
    if name not in results:
        pytest.skip("run with two processes only")
    return results[name]


@pytest.mark.parametrize("damage", ["none", *ON_ALL, *ON_ONE])
@pytest.mark.parametrize("tensors", TENSORS)
def test_all_ranks_act_alike(damaged: list[dict[str, Any]], tensors: int, damage: str) -> None:
    seen = [trial_of(results, tensors, damage) for results in damaged]
    for name in ("rewound", "step", "stopped", "lost"):
        assert all(s[name] == seen[0][name] for s in seen), name
    assert not any(s["stopped"] or s["lost"] for s in seen)
    assert seen[0]["equal"], "all ranks end with the same, finite weights"
    assert bool(seen[0]["rewound"]) == (damage != "none")


@pytest.mark.parametrize("damage", ON_ONE)
@pytest.mark.parametrize("tensors", TENSORS)
def test_rank_with_different_weights_is_found_and_made_equal(
    damaged: list[dict[str, Any]], tensors: int, damage: str
) -> None:
    first = trial_of(damaged[0], tensors, damage)
    culprit = len(damaged) - 1
    assert ["rewind", "rank_fault"] in [d[:2] for d in first["decided"]]
    assert first["again"] >= 1, "a comparison after the rewind found the ranks equal"
    assert set(first["apart"]) <= ({culprit} if culprit > 1 else {culprit, -1}), (
        "with two ranks the faulty one may be undecided"
    )


@pytest.mark.parametrize("damage", ["none", *ON_ALL])
@pytest.mark.parametrize("tensors", TENSORS)
def test_equal_ranks_have_no_finding(damaged: list[dict[str, Any]], tensors: int, damage: str) -> None:
    assert not trial_of(damaged[0], tensors, damage)["details"]


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launched("ranks_unlike.py", 2, tmp_path_factory.mktemp("unlike"))


INTENDED = ("own models", "local sgd", "ddp then local")
NO_FINDING = ("averaged by the loop", "gradients kept on one rank", "uneven batches")
CORRECTED = ("averaged by the loop, nudged", "zero")
OTHERS = (
    "no snapshots",
    "observed",
    "lr raised on one rank",
    "nan under loss scaling, on one rank",
    "nan under loss scaling, on all ranks",
)


@pytest.mark.parametrize("trial", [*INTENDED, *NO_FINDING, *CORRECTED, *OTHERS])
def test_judged_rows_are_equal_on_all_ranks(unlike: list[dict[str, Any]], trial: str) -> None:
    first, second = (results[trial] for results in unlike)
    assert len(first["rows"]) > 40
    assert first["rows"] == second["rows"]
    for name in ("rewound", "step", "stopped", "lost"):
        assert first[name] == second[name], name


@pytest.mark.parametrize("trial", INTENDED)
def test_intentionally_different_ranks_are_reported_once_without_action(
    unlike: list[dict[str, Any]], trial: str
) -> None:
    first = unlike[0][trial]
    details = [detail for detector, _, detail in first["findings"] if detector == "replicas"]
    assert len(details) == 1
    assert "taken as intended" in details[0]
    assert not first["rewound"]
    assert not first["decided"]


@pytest.mark.parametrize("trial", NO_FINDING)
def test_ranks_kept_equal_are_not_touched(unlike: list[dict[str, Any]], trial: str) -> None:
    first = unlike[0][trial]
    assert not [f for f in first["findings"] if f[0] == "replicas"]
    assert not first["rewound"]


@pytest.mark.parametrize("trial", CORRECTED)
def test_ranks_without_ddp_are_made_equal_again(unlike: list[dict[str, Any]], trial: str) -> None:
    assert unlike[0][trial]["equal"]


def test_without_snapshots_the_finding_advises_a_restart_and_training_continues(unlike: list[dict[str, Any]]) -> None:
    first = unlike[0]["no snapshots"]
    assert not first["stopped"]
    details = [detail for detector, _, detail in first["findings"] if detector == "replicas"]
    assert any("start all ranks again from a checkpoint" in detail for detail in details)


def test_observe_records_the_decision_without_a_rewind(unlike: list[dict[str, Any]]) -> None:
    first = unlike[0]["observed"]
    assert ["rewind", "rank_fault"] in first["decided"]
    assert not first["rewound"]


def test_difference_that_returns_immediately_is_not_rewound_again(unlike: list[dict[str, Any]]) -> None:
    first = unlike[0]["lr raised on one rank"]
    assert len(first["rewound"]) == 1
    assert any("right after they were made equal" in detail for _, _, detail in first["findings"])

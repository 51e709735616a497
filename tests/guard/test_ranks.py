"""Real processes over gloo: all ranks decide alike and none waits in vain, and ranks that drift are made equal."""

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
        timeout=300,  # a collective that waits in vain ends after 30 seconds
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"told-{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module", params=WORLDS)
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of so many saw."""
    return launched("ranks_damaged.py", request.param, tmp_path_factory.mktemp("damaged"))


def trial_of(told: dict[str, Any], tensors: int, damage: str) -> dict[str, Any]:
    name = f"{tensors} tensors, {damage}"
    if name not in told:
        pytest.skip("tried with two processes only")
    return told[name]


@pytest.mark.parametrize("damage", ["none", *ON_ALL, *ON_ONE])
@pytest.mark.parametrize("tensors", TENSORS)
def test_all_ranks_do_the_same(damaged: list[dict[str, Any]], tensors: int, damage: str) -> None:
    seen = [trial_of(told, tensors, damage) for told in damaged]
    for name in ("rewound", "step", "stopped", "lost"):
        assert all(s[name] == seen[0][name] for s in seen), name
    assert not any(s["stopped"] or s["lost"] for s in seen)
    assert seen[0]["equal"], "all ranks end with the same, finite weights"
    assert bool(seen[0]["rewound"]) == (damage != "none")


@pytest.mark.parametrize("damage", ON_ONE)
@pytest.mark.parametrize("tensors", TENSORS)
def test_a_rank_that_drifts_apart_is_found_and_made_equal(
    damaged: list[dict[str, Any]], tensors: int, damage: str
) -> None:
    first = trial_of(damaged[0], tensors, damage)
    culprit = len(damaged) - 1
    assert ["rewind", "rank_fault"] in [d[:2] for d in first["decided"]]
    assert first["again"] >= 1, "a comparison after the way back has found the ranks equal"
    assert set(first["apart"]) <= ({culprit} if culprit > 1 else {culprit, -1}), (
        "two alone may leave it open whose fault"
    )


@pytest.mark.parametrize("damage", ["none", *ON_ALL])
@pytest.mark.parametrize("tensors", TENSORS)
def test_ranks_that_are_equal_are_not_suspected(damaged: list[dict[str, Any]], tensors: int, damage: str) -> None:
    assert not trial_of(damaged[0], tensors, damage)["details"]


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launched("ranks_unlike.py", 2, tmp_path_factory.mktemp("unlike"))


INTENDED = ("own models", "local sgd", "ddp then local")
QUIET = ("averaged by the loop", "gradients kept on one rank", "uneven batches")
MENDED = ("averaged by the loop, nudged", "zero")
OTHERS = (
    "no state to go back to",
    "observed",
    "rate raised on one rank",
    "nan under loss scaling, on one rank",
    "nan under loss scaling, on all ranks",
)


@pytest.mark.parametrize("trial", [*INTENDED, *QUIET, *MENDED, *OTHERS])
def test_every_number_that_is_judged_is_the_same_on_all_ranks(unlike: list[dict[str, Any]], trial: str) -> None:
    one, other = (told[trial] for told in unlike)
    assert len(one["rows"]) > 40
    assert one["rows"] == other["rows"]
    for name in ("rewound", "step", "stopped", "lost"):
        assert one[name] == other[name], name


@pytest.mark.parametrize("trial", INTENDED)
def test_ranks_that_are_not_meant_to_be_equal_are_told_once_and_left_alone(
    unlike: list[dict[str, Any]], trial: str
) -> None:
    first = unlike[0][trial]
    told = [detail for detector, _, detail in first["findings"] if detector == "replicas"]
    assert len(told) == 1
    assert "taken as intended" in told[0]
    assert not first["rewound"]
    assert not first["decided"]


@pytest.mark.parametrize("trial", QUIET)
def test_ranks_kept_equal_are_not_touched(unlike: list[dict[str, Any]], trial: str) -> None:
    first = unlike[0][trial]
    assert not [f for f in first["findings"] if f[0] == "replicas"]
    assert not first["rewound"]


@pytest.mark.parametrize("trial", MENDED)
def test_equal_again_without_ddp_too(unlike: list[dict[str, Any]], trial: str) -> None:
    assert unlike[0][trial]["equal"]


def test_without_a_state_to_go_back_to_the_way_out_is_told_and_training_goes_on(unlike: list[dict[str, Any]]) -> None:
    first = unlike[0]["no state to go back to"]
    assert not first["stopped"]
    details = [detail for detector, _, detail in first["findings"] if detector == "replicas"]
    assert any("start all ranks again from a checkpoint" in detail for detail in details)


def test_observing_tells_what_would_have_been_done(unlike: list[dict[str, Any]]) -> None:
    first = unlike[0]["observed"]
    assert ["rewind", "rank_fault"] in first["decided"]
    assert not first["rewound"]


def test_a_difference_that_comes_back_at_once_is_left_alone(unlike: list[dict[str, Any]]) -> None:
    first = unlike[0]["rate raised on one rank"]
    assert len(first["rewound"]) == 1
    assert any("right after they were made equal" in detail for _, _, detail in first["findings"])

"""Two ranks that save, verify a resume and handle an incident together."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "two_saving.py"


@pytest.fixture(scope="module")
def told(two_processes: Callable[[Path], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return two_processes(SCRIPT)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_both_ranks_verify_their_resume(kind: str, told: list[dict[str, Any]]) -> None:
    seen = told[0][kind]
    assert seen["second"]["begun"] == 40
    assert seen["second"]["proofs"] == [["proved", True, "equal"]] * 2  # each tells of itself
    assert not seen["third"]["failed"]
    assert not seen["second"]["failed"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_incident_on_one_rank_saves_a_good_snapshot(kind: str, told: list[dict[str, Any]]) -> None:
    kinds = told[0][kind]["second"]["kinds"]
    assert ["emergency", "healthy"] in kinds.values()
    assert told[1][kind]["third"]["begun"] == told[0][kind]["third"]["begun"] > 40


def test_a_signal_to_one_rank_during_an_evaluation_ends_both(told: list[dict[str, Any]]) -> None:
    for seen in (one["evaluated"] for one in told):
        assert seen["code"] == 128 + signal.SIGTERM
        assert 5 <= seen["calls"] < 1999
        assert seen["kept"] == [[20, "emergency"]]


def test_averaged_weights_that_are_the_same_everywhere_are_written_once(told: list[dict[str, Any]]) -> None:
    assert told[0]["ddp"]["first"]["ema"] == [[], []]

"""Two ranks that save, verify a resume and handle an incident together."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "two_saving.py"


@pytest.fixture(scope="module")
def results(two_processes: Callable[[Path], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return two_processes(SCRIPT)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_both_ranks_verify_their_resume(kind: str, results: list[dict[str, Any]]) -> None:
    result = results[0][kind]
    assert result["second"]["begun"] == 40
    assert result["second"]["proofs"] == [["proved", True, "equal"]] * 2  # one per rank
    assert not result["third"]["failed"]
    assert not result["second"]["failed"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_incident_on_one_rank_saves_a_good_snapshot(kind: str, results: list[dict[str, Any]]) -> None:
    kinds = results[0][kind]["second"]["kinds"]
    assert ["emergency", "healthy"] in kinds.values()
    assert results[1][kind]["third"]["begun"] == results[0][kind]["third"]["begun"] > 40


def test_signal_to_one_rank_during_an_evaluation_ends_both(results: list[dict[str, Any]]) -> None:
    for result in (rank_results["evaluated"] for rank_results in results):
        assert result["code"] == 128 + signal.SIGTERM
        assert 5 <= result["calls"] < 1999
        assert result["kept"] == [[20, "emergency"]]


def test_equal_averaged_weights_are_written_once(results: list[dict[str, Any]]) -> None:
    assert results[0]["ddp"]["first"]["ema"] == [[], []]

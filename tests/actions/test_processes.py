"""Two ranks act together: on CPU with gloo, under DDP, FSDP2 and a sharded optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "two_rank_rewind.py"
KINDS = ("ddp", "ddp fused", "fsdp2", "fsdp2 fused", "zero")


@pytest.fixture(scope="module")
def results(two_processes: Callable[[Path], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of both ranks."""
    return two_processes(SCRIPT)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_rewind_to_the_same_snapshot_and_continue(
    kind: str, rank: int, results: list[dict[str, Any]]
) -> None:
    assert results[rank][kind] == {"rewinds": [[7, 8]], "on": True, "step": 12, "lost": True}, "lost: closed by now"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_rewind_uses_the_newest_snapshot_that_both_ranks_have(
    kind: str, rank: int, results: list[dict[str, Any]]
) -> None:
    assert results[rank][f"{kind} lacking"] == {"rewinds": [[3, 4]], "on": True, "step": 8, "lost": True}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero"])
def test_lr_is_lowered_on_both_ranks(kind: str, results: list[dict[str, Any]]) -> None:
    assert results[0]["rate"][kind]
    assert results[1]["rate"][kind]


def test_unprotected_rank_does_not_block_the_other(results: list[dict[str, Any]]) -> None:
    assert "lost its protection" in results[0]["lost"]["failures"][0]
    assert results[0]["lost"]["rewinds"] == results[1]["lost"]["rewinds"] == []


def test_unlike_ranks_take_the_same_snapshots(results: list[dict[str, Any]]) -> None:
    """What the ranks with the dearest snapshots and with the least room propose holds for all of them."""
    first, second = (result["unlike"] for result in results)
    assert first["proposed"] < second["proposed"] == 50
    assert first["updates"] == second["updates"] == 50
    assert first["size"] == second["size"] == 5
    assert first["taken"] == second["taken"]
    assert first["held"] == second["held"]

"""Two ranks over gloo: the same decision at the same step on both, and the failing rank is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "two_rank_gate.py"
KINDS = ("ddp", "ddp fused", "fsdp2", "fsdp2 fused", "zero")


@pytest.fixture(scope="module")
def results(two_processes: Callable[[Path], list[list[dict[str, Any]]]]) -> list[list[dict[str, Any]]]:
    """The results of both ranks."""
    return two_processes(SCRIPT)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["nan", "burst", "buffer"])
@pytest.mark.parametrize("kind", KINDS)
def test_fault_on_one_rank_is_refused_by_all(
    kind: str, fault: str, rank: int, results: list[list[dict[str, Any]]]
) -> None:
    result = next(t for t in results[rank] if t.get("kind") == kind and t["fault"] == fault)
    assert result["unchanged"], "weights, optimizer state and buffers are bit-identical after the refusal"
    assert result["applied"], "the next healthy update is applied"
    assert result["verdicts"] == [0] * 6 + [2 if fault == "burst" else 1, 0]
    if fault == "buffer":
        assert result["refusals"] == ["the batch made buffer body.0.running_var non-finite"]
    else:
        assert result["named"] == [-1] * 6 + [1, -1]
    assert result["steps"] == 7
    assert result["measured"][:6] == pytest.approx(result["norms"][:6], rel=1e-5)
    assert result["veto_methods"] == ("device" if "fused" in kind else "host")


@pytest.mark.parametrize("placement", ["rows", "columns", "replicate", "partial"])
def test_stats_count_each_element_once_for_every_placement(placement: str, results: list[list[dict[str, Any]]]) -> None:
    for rank in (0, 1):
        assert results[rank][-1][placement] < 1e-6

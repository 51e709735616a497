"""Two ranks over gloo: the same decision at the same step on both, and the failing rank is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "two_processes.py"
KINDS = ("ddp", "ddp fused", "fsdp2", "fsdp2 fused", "zero")


@pytest.fixture(scope="module")
def told(two_processes: Callable[[Path], list[list[dict[str, Any]]]]) -> list[list[dict[str, Any]]]:
    """The results of both ranks."""
    return two_processes(SCRIPT)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["nan", "burst", "buffer"])
@pytest.mark.parametrize("kind", KINDS)
def test_trouble_on_one_rank_is_refused_by_all(
    kind: str, fault: str, rank: int, told: list[list[dict[str, Any]]]
) -> None:
    seen = next(t for t in told[rank] if t.get("kind") == kind and t["fault"] == fault)
    assert seen["held"], "weights, optimizer state and buffers are bit-identical after the refusal"
    assert seen["landed"], "the next healthy update lands"
    assert seen["verdicts"] == [0] * 6 + [2 if fault == "burst" else 1, 0]
    if fault == "buffer":
        assert seen["refusals"] == ["the batch made buffer body.0.running_var non-finite"]
    else:
        assert seen["named"] == [-1] * 6 + [1, -1]
    assert seen["steps"] == 7
    assert seen["measured"][:6] == pytest.approx(seen["norms"][:6], rel=1e-5)
    assert seen["ways"] == ("device" if "fused" in kind else "host")


@pytest.mark.parametrize("placement", ["rows", "columns", "replicate", "partial"])
def test_every_placement_counts_each_element_once(placement: str, told: list[list[dict[str, Any]]]) -> None:
    for rank in (0, 1):
        assert told[rank][-1][placement] < 1e-6

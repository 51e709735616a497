"""Two processes over gloo: the same decision at the same step on both, and the one that brought trouble is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "two_processes.py"
KINDS = ("ddp", "ddp fused", "fsdp2", "fsdp2 fused", "zero")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each of the two processes saw."""
    out = tmp_path_factory.mktemp("processes")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(out)],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"told-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["nan", "burst"])
@pytest.mark.parametrize("kind", KINDS)
def test_trouble_on_one_rank_is_refused_by_all(
    kind: str, fault: str, rank: int, told: list[list[dict[str, Any]]]
) -> None:
    seen = next(t for t in told[rank] if t.get("kind") == kind and t["fault"] == fault)
    assert seen["held"], "weights, optimizer state and buffers are bit-identical after the refusal"
    assert seen["landed"], "the next healthy update lands"
    assert seen["verdicts"] == [0] * 6 + [1 if fault == "nan" else 2, 0]
    assert seen["named"] == [-1] * 6 + [1, -1]
    assert seen["steps"] == 7
    assert seen["measured"][:6] == pytest.approx(seen["norms"][:6], rel=1e-5)
    assert seen["ways"] == ("device" if "fused" in kind else "host")


@pytest.mark.parametrize("placement", ["rows", "columns", "replicate", "partial"])
def test_every_placement_counts_each_element_once(placement: str, told: list[list[dict[str, Any]]]) -> None:
    for rank in (0, 1):
        assert told[rank][-1][placement] < 1e-6

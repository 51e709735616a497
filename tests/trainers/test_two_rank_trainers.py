"""The integrations on two ranks, with DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot.records import Verdict

WHY = "transformers is not installed: pip install 'surefoot[hf]'"
pytest.importorskip("surefoot.integrations.hf", reason=WHY, exc_type=ImportError)


@pytest.fixture(scope="module")
def results(two_processes) -> list[dict[str, Any]]:
    return two_processes(Path(__file__).parent / "two_rank_trainers.py")


def test_healthy_run_with_ddp_is_unchanged(results):
    assert all(rank["same"] for rank in results)


def test_damaged_run_with_ddp_is_rewound_on_both_ranks_and_ends_its_schedule(results):
    for rank in results:
        after_30_steps, after_damage = rank["losses"]
        assert after_damage < 0.5 * after_30_steps
        assert rank["steps"] == [200, 0.0]
    assert "rewound" in results[0]["events"]
    assert "degraded" not in results[0]["events"]


def test_nan_on_one_rank_is_refused_with_fsdp2(results):
    assert all(rank["refused"] for rank in results)
    verdicts = results[0]["verdicts"]
    assert [i for i, verdict in enumerate(verdicts) if verdict != Verdict.APPLIED] == [10]

"""One of two ranks runs out of memory: no rank is left waiting, and the updates stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NOISE = 1e-5
"""Relative tolerance of losses whose sums are in another order."""


@pytest.fixture(scope="module")
def results(two_processes: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    return two_processes(Path(__file__).with_name("two_rank_memory.py"), "--max-restarts", "1")[0]


@pytest.mark.parametrize("name", ["forward", "backward", "evaluation"])
def test_one_rank_makes_its_part_again_while_the_other_waits(results: dict[str, Any], name: str) -> None:
    run = results[name]
    assert run["ranks"] == [1] * len(run["ranks"])
    assert len(run["ranks"]) > 0
    np.testing.assert_allclose(run["losses"], results["undisturbed"]["losses"], rtol=NOISE)
    np.testing.assert_allclose(run["evals"], results["undisturbed"]["evals"], rtol=NOISE)


def test_in_the_exchange_of_gradients_both_end_and_continue_in_smaller_micro_batches(results: dict[str, Any]) -> None:
    assert results["ended-exchange-1"] == "75"
    assert results.get("ended-exchange-0", "75") == "75"  # the launcher may have ended it first
    run, undisturbed = results["exchange"], results["undisturbed"]
    assert len(run["reasons"]) == 1  # nothing fails after the restart
    assert "a restart uses micro-batches of 2 (accumulation 2)" in run["reasons"][0]
    losses = dict(zip(run["steps"], run["losses"], strict=True))
    np.testing.assert_allclose([losses[step] for step in undisturbed["steps"]], undisturbed["losses"], rtol=NOISE)

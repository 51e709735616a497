"""Two ranks with every strategy, half precision and accumulation have the losses of a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import small_recipe

import surefoot
from surefoot.cli.train import show
from surefoot.train import exit_codes

FLOAT32, FLOAT16, BFLOAT16 = 1e-5, 1e-4, 1e-3
"""Relative tolerance of losses: sums in another order; 11 and 8 bits of precision."""


def losses(folder: Path, **sections: Any) -> np.ndarray:
    """Losses of three epochs of 26 samples, 8 per update: each epoch ends with an update of 2."""
    assert show(small_recipe(folder, steps=None, epochs=3, **sections), ()) == exit_codes.DONE
    return surefoot.read(folder / "run").scalars["loss"]


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    values = losses(tmp_path_factory.mktemp("plain"))
    assert len(values) == 12
    assert values[-1] < values[0] - 0.2  # the compared values are not constant
    return values


@pytest.fixture(scope="module")
def results(two_processes: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    return two_processes(Path(__file__).with_name("two_rank_train.py"), "--max-restarts", "1")[0]


def test_micro_batches_of_different_lengths_equal_one_batch(tmp_path: Path, single_process: np.ndarray) -> None:
    values = losses(tmp_path, batch={"size": 2, "accumulate": 4})
    np.testing.assert_allclose(values, single_process, rtol=FLOAT32)


def test_float16_with_accumulation_has_nearly_the_same_losses(tmp_path: Path, single_process: np.ndarray) -> None:
    values = losses(tmp_path, batch={"size": 2, "accumulate": 4}, precision={"compute": "float16"})
    np.testing.assert_allclose(values, single_process, rtol=FLOAT16)


@pytest.mark.parametrize("case", ["data", "zero1", "zero2", "zero3"])
def test_two_ranks_have_the_losses_of_one(results: dict[str, Any], single_process: np.ndarray, case: str) -> None:
    np.testing.assert_allclose(results[case], single_process, rtol=FLOAT32)


@pytest.mark.parametrize(("case", "tolerance"), [("data float16", FLOAT16), ("zero3 bfloat16", BFLOAT16)])
def test_two_ranks_in_half_precision_have_nearly_the_same_losses(
    results: dict[str, Any], single_process: np.ndarray, case: str, tolerance: float
) -> None:
    np.testing.assert_allclose(results[case], single_process, rtol=tolerance)


def test_killed_rank_restarts_both_and_the_result_is_bit_identical(results: dict[str, Any]) -> None:
    assert results["killed"]
    assert results["resumed"]
    assert results["same"]

"""Two processes, every way to spread a model, half precision and accumulation: the losses of one plain process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import small

import surefoot
from surefoot.cli.train import show
from surefoot.train import exit_codes

FLOAT32, FLOAT16, BFLOAT16 = 1e-5, 1e-4, 1e-3
"""How far losses may lie apart, as a share: sums in another order; 11 and 8 bits of precision."""


def losses(folder: Path, **sections: Any) -> np.ndarray:
    """Of three rounds through 26 samples, 8 an update: each ends with a group of 2."""
    assert show(small(folder, steps=None, epochs=3, **sections), ()) == exit_codes.DONE
    return surefoot.read(folder / "run").scalars["loss"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    found = losses(tmp_path_factory.mktemp("plain"))
    assert len(found) == 12
    assert found[-1] < found[0] - 0.2  # what is compared is not the same all the time
    return found


@pytest.fixture(scope="module")
def told(two_processes: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    return two_processes(Path(__file__).with_name("two_engines.py"), "--max-restarts", "1")[0]


def test_micro_batches_of_different_lengths_make_the_update_of_one_batch(tmp_path: Path, plain: np.ndarray) -> None:
    found = losses(tmp_path, batch={"size": 2, "accumulate": 4})
    np.testing.assert_allclose(found, plain, rtol=FLOAT32)


def test_float16_with_scaling_and_accumulation_has_nearly_the_same_losses(tmp_path: Path, plain: np.ndarray) -> None:
    found = losses(tmp_path, batch={"size": 2, "accumulate": 4}, precision={"compute": "float16"})
    np.testing.assert_allclose(found, plain, rtol=FLOAT16)


@pytest.mark.parametrize("how", ["data", "zero1", "zero2", "zero3"])
def test_two_processes_have_the_losses_of_one(told: dict[str, Any], plain: np.ndarray, how: str) -> None:
    np.testing.assert_allclose(told[how], plain, rtol=FLOAT32)


@pytest.mark.parametrize(("how", "apart"), [("data float16", FLOAT16), ("zero3 bfloat16", BFLOAT16)])
def test_two_processes_in_half_precision_nearly_so(
    told: dict[str, Any], plain: np.ndarray, how: str, apart: float
) -> None:
    np.testing.assert_allclose(told[how], plain, rtol=apart)


def test_when_one_of_two_is_killed_both_are_started_again_and_end_with_the_same_bits(told: dict[str, Any]) -> None:
    assert told["killed"]
    assert told["resumed"]
    assert told["same"]

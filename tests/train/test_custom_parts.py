"""A user's model, data and loss, named as module:name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from small_runs import small_recipe

import surefoot
from surefoot.cli.train import show
from surefoot.train import exit_codes


def losses(folder: Path, **sections: object) -> np.ndarray:
    """The losses of all updates of a run."""
    assert (
        show(small_recipe(folder, evaluation={"every": 30}, optimizer={"lr": 0.03}, **sections), ()) == exit_codes.DONE
    )
    return surefoot.read(folder / "run").scalars["loss"]


def test_modules_in_the_working_directory_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(__file__).with_name("custom_parts.py"), tmp_path / "mine_alone.py")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    data = {"kind": "own", "dataset": {"factory": "mine_alone:points", "count": 120}}
    model = {"factory": "mine_alone:classifier", "width": 8}
    values = losses(tmp_path, steps=60, model=model, data=data, loss="mine_alone:mean_loss")
    assert len(values) == 60
    assert values[-10:].mean() < 0.6 * values[:5].mean()
    output = capsys.readouterr().out
    assert "114 samples" in output
    assert "eval" in output


def test_mean_loss_and_sum_loss_with_count_train_alike(tmp_path: Path) -> None:
    data = {"kind": "own", "dataset": "custom_parts:points", "collate": "custom_parts:with_count"}
    sections = {"model": "custom_parts:reads_numbers", "data": data, "steps": None, "epochs": 2}
    mean = losses(tmp_path / "mean", **sections, loss="custom_parts:mean_loss")
    summed = losses(tmp_path / "sum", **sections, loss="custom_parts:sum_loss")
    accumulated = losses(
        tmp_path / "parts", **sections, loss="custom_parts:sum_loss", batch={"size": 3, "accumulate": 3}
    )
    one_batch = losses(tmp_path / "one_batch", **sections, loss="custom_parts:sum_loss", batch={"size": 9})
    assert len(mean) == 22  # 86 samples, 8 per update, two epochs
    np.testing.assert_allclose(mean, summed, rtol=1e-5)
    np.testing.assert_allclose(accumulated, one_batch, rtol=1e-4)  # 86 samples end with a group of 3 and 2


@pytest.mark.parametrize(("allowed", "code"), [(4, exit_codes.DONE), (3, exit_codes.FAILED)])
def test_unreadable_samples_are_named_and_too_many_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], allowed: int, code: int
) -> None:
    data = {
        "kind": "own",
        "dataset": {"factory": "custom_parts:Holes", "holes": 4},
        "held_out": 0,
        "bad_samples": allowed,
    }
    recipe = small_recipe(tmp_path, data=data, model="custom_parts:classifier", loss="custom_parts:mean_loss")
    assert show(recipe, ()) == code
    output, errors = capsys.readouterr()
    assert "skipped an unreadable sample: sample 10: OSError: disk sector 10 is gone" in output
    assert "Traceback" not in errors
    if code == exit_codes.DONE:
        assert "4 samples were skipped" in output
    else:
        assert "4 samples could not be read, and data.bad_samples allows 3" in errors

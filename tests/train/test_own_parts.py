"""A model, data and a loss of one's own, named as module:name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from small_runs import small

import surefoot
from surefoot.cli.train import show
from surefoot.train import exit_codes


def losses(folder: Path, **sections: object) -> np.ndarray:
    """Of all updates of a run."""
    assert show(small(folder, evaluation={"every": 30}, optimizer={"lr": 0.03}, **sections), ()) == exit_codes.DONE
    return surefoot.read(folder / "run").scalars["loss"]


def test_modules_of_the_working_directory_are_trained_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(__file__).with_name("own_parts.py"), tmp_path / "mine_alone.py")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    data = {"kind": "own", "dataset": {"factory": "mine_alone:points", "many": 120}}
    model = {"factory": "mine_alone:classifier", "width": 8}
    found = losses(tmp_path, steps=60, model=model, data=data, loss="mine_alone:mean_loss")
    assert len(found) == 60
    assert found[-10:].mean() < 0.6 * found[:5].mean()
    told = capsys.readouterr().out
    assert "114 samples" in told
    assert "eval" in told


def test_a_mean_and_a_sum_with_its_count_train_alike_however_they_are_accumulated(tmp_path: Path) -> None:
    data = {"kind": "own", "dataset": "own_parts:points", "collate": "own_parts:with_count"}
    own = {"model": "own_parts:reads_numbers", "data": data, "steps": None, "epochs": 2}
    mean = losses(tmp_path / "mean", **own, loss="own_parts:mean_loss")
    summed = losses(tmp_path / "sum", **own, loss="own_parts:sum_loss")
    parts = losses(tmp_path / "parts", **own, loss="own_parts:sum_loss", batch={"size": 3, "accumulate": 3})
    whole = losses(tmp_path / "whole", **own, loss="own_parts:sum_loss", batch={"size": 9})
    assert len(mean) == 22  # 86 samples, 8 an update, twice
    np.testing.assert_allclose(mean, summed, rtol=1e-5)
    np.testing.assert_allclose(parts, whole, rtol=1e-4)  # 86 samples end with a group of 3 and 2


@pytest.mark.parametrize(("allowed", "code"), [(4, exit_codes.DONE), (3, exit_codes.FAILED)])
def test_samples_that_cannot_be_read_are_named_and_too_many_of_them_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], allowed: int, code: int
) -> None:
    data = {"kind": "own", "dataset": {"factory": "own_parts:Holes", "holes": 4}, "held_out": 0, "bad_samples": allowed}
    recipe = small(tmp_path, data=data, model="own_parts:classifier", loss="own_parts:mean_loss")
    assert show(recipe, ()) == code
    told, errors = capsys.readouterr()
    assert "skipped an unreadable sample: sample 10: OSError: disk sector 10 is gone" in told
    assert "Traceback" not in errors
    if code == exit_codes.DONE:
        assert "4 samples were skipped" in told
    else:
        assert "4 samples could not be read, and data.bad_samples allows 3" in errors

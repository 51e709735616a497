"""Invalid recipes are refused before training: one message with advice, exit code 2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import small_recipe

from surefoot.cli.train import show
from surefoot.journal.lock import WriterLock
from surefoot.train import exit_codes

CUSTOM_DATA = {"kind": "own", "dataset": "custom_parts:points"}


def error_of(capsys: pytest.CaptureFixture[str], recipe: str, overrides: Sequence[str] = ()) -> str:
    """The one message on stderr."""
    assert show(recipe, overrides) == exit_codes.USAGE
    captured = capsys.readouterr()
    assert "step 1/" not in captured.out
    assert "Traceback" not in captured.err
    assert len(re.findall("^surefoot train: ", captured.err, re.MULTILINE)) == 1
    return captured.err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["modle.width=8"], "there is no such key. Did you mean model?"),
        (["optimizer.lr=fast"], "optimizer.lr=fast: expected a number (above 0)"),
        (["data.path=missing.txt"], "missing.txt"),
        (["data.held_out_path=missing.txt"], "data.held_out_path"),
        (["model.vocab=100"], "give the model at least 256"),
        (["model.width=15"], "try width 64"),
        (["model.layer=2"], "did you mean layers?"),
        (["model.factory=surefoot.models:decodr"], "Did you mean 'decoder'?"),
        (["loss=surefoot.models:next_tokn"], "Did you mean 'next_token'?"),
        (["loss=no_such_module:loss"], "no_such_module"),
        (["optimizer.name=adamm"], "did you mean adam"),
        (["schedule.warmup=400"], "schedule.warmup"),
        (["loss=custom_parts:failing"], "custom_parts:failing cannot be called with (model, batch)"),
        (
            ["loss=custom_parts:no_loss"],
            "loss.factory: custom_parts:no_loss returned a str; return a tensor with one value",
        ),
        (["loss=custom_parts:loss_and_logits"], "returned a count that is a Tensor"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_invalid_recipe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert message in error_of(capsys, small_recipe(tmp_path), overrides)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": "custom_parts:broken"},
            r"broken failed: KeyError: 'embedding' \(.*custom_parts.py, line",
        ),
        ({"model": "custom_parts:huge"}, r"1,099,513 M parameters take .* GB .* smaller"),
        ({"model": "custom_parts:points"}, "returned a TensorDataset, not a torch.nn.Module"),
        ({"data": CUSTOM_DATA | {"dataset": "custom_parts:Noisy"}}, "expected a dataset with __len__ and __getitem__"),
        ({"data": CUSTOM_DATA | {"dataset": "custom_parts:nothing"}}, "the dataset has 0 samples"),
        ({"data": {"path": ["texts"]}}, "texts"),
    ],
    ids=["raises", "too large", "no model", "no dataset", "empty dataset", "empty folder"],
)
def test_parts_that_cannot_be_built_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sections: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    assert re.search(message, error_of(capsys, small_recipe(tmp_path, **sections)))


def test_summed_loss_without_counts_cannot_be_accumulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipe(tmp_path, model="custom_parts:classifier", loss="custom_parts:sum_loss", data=CUSTOM_DATA)
    assert "Let data.collate return dicts with a count" in error_of(capsys, recipe, ["batch.accumulate=2"])


def test_same_command_trains_once_the_loss_is_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipe(tmp_path, steps=2)
    error_of(capsys, recipe, ["loss=custom_parts:no_loss"])
    assert show(recipe, ()) == exit_codes.DONE


def test_run_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    lock = WriterLock(tmp_path / "run").acquire()
    try:
        assert "is in use" in error_of(capsys, small_recipe(tmp_path))
    finally:
        lock.release()

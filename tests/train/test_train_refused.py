"""What cannot be trained is refused before anything long begins: one message with the way out, exit code 2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import small

from surefoot.cli.train import show
from surefoot.journal.lock import WriterLock
from surefoot.train import exit_codes

OWN = {"kind": "own", "dataset": "own_parts:points"}


def refused(capsys: pytest.CaptureFixture[str], recipe: str, overrides: Sequence[str] = ()) -> str:
    """The one message."""
    assert show(recipe, overrides) == exit_codes.USAGE
    told = capsys.readouterr()
    assert "step 1/" not in told.out
    assert "Traceback" not in told.err
    assert len(re.findall("^surefoot train: ", told.err, re.MULTILINE)) == 1
    return told.err


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
        (["loss=own_parts:failing"], "own_parts:failing cannot be called with (model, batch)"),
        (["loss=own_parts:no_loss"], "loss.factory: own_parts:no_loss returned a str; return a tensor with one value"),
        (["loss=own_parts:loss_and_logits"], "returned a count that is a Tensor"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_recipe_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert message in refused(capsys, small(tmp_path), overrides)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": "own_parts:broken"},
            r"broken failed: KeyError: 'embedding' \(.*own_parts.py, line",
        ),
        ({"model": "own_parts:huge"}, r"1,099,513 M parameters take .* GB .* smaller"),
        ({"model": "own_parts:points"}, "returned a TensorDataset, not a torch.nn.Module"),
        ({"data": OWN | {"dataset": "own_parts:Noisy"}}, "expected a dataset with __len__ and __getitem__"),
        ({"data": OWN | {"dataset": "own_parts:nothing"}}, "the dataset has 0 samples"),
        ({"data": {"path": ["texts"]}}, "texts"),
    ],
    ids=["raises", "too large", "no model", "no dataset", "empty dataset", "empty folder"],
)
def test_parts_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sections: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    assert re.search(message, refused(capsys, small(tmp_path, **sections)))


def test_sums_without_counts_cannot_be_accumulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small(tmp_path, model="own_parts:classifier", loss="own_parts:sum_loss", data=OWN)
    assert "Let data.collate return dicts with a count" in refused(capsys, recipe, ["batch.accumulate=2"])


def test_once_the_loss_is_mended_the_same_command_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small(tmp_path, steps=2)
    refused(capsys, recipe, ["loss=own_parts:no_loss"])
    assert show(recipe, ()) == exit_codes.DONE


def test_a_run_directory_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    lock = WriterLock(tmp_path / "run").acquire()
    try:
        assert "is in use" in refused(capsys, small(tmp_path))
    finally:
        lock.release()

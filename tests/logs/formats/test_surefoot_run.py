"""A surefoot run directory, read as a log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surefoot.journal import Journal
from surefoot.logs.formats import detect, surefoot_run
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.records import Action, Cause, Decision, Diagnosis, StepMetrics, Verdict


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    journal = Journal(folder, info={}, on_failure=pytest.fail)
    for step in range(50):
        bad = step == 40
        journal.row(
            StepMetrics(
                step=step,
                attempt=step,
                time=1e9 + step,
                loss=float("nan") if bad else 2.0 - step / 100,
                norm=1.0,
                lr=0.1,
                verdict=Verdict.NONFINITE if bad else Verdict.APPLIED,
            )
        )
    journal.event(Diagnosis(step=40, attempt=40, cause=Cause.LEARNING_RATE, confidence=0.75, detail="Too high."))
    journal.event(Decision(step=40, attempt=40, action=Action.REWIND, reason="the loss is NaN"))
    journal.close()
    return folder


def test_run_gives_its_metrics_and_diagnoses(run: Path) -> None:
    (table,) = detect.read_log(run)
    assert table.format == "run"
    assert table.records == 50
    assert np.isnan(table.columns["loss"].values).sum() == 1
    assert table.columns["step"].values[-1] == 49
    assert len(table.columns["grad_norm"]) == 50
    assert "loss_scale" not in table.columns
    assert table.settings["diagnosed"] == "learning_rate@40"
    assert table.settings["decided"] == "rewind@40"
    assert any("learning_rate (75 % confidence)" in note for note in table.notes)
    assert any("the loss is NaN" in note for note in table.notes)


@pytest.mark.parametrize("part", ["events.jsonl", "run.json"])
def test_path_inside_a_run_means_the_run(run: Path, part: str) -> None:
    (table,) = detect.read_log(run / part)
    assert table.format == "run"
    assert table.records == 50


def test_run_in_a_folder_of_other_files_is_found(run: Path) -> None:
    (run.parent / "notes.txt").write_text("nothing of use\n")
    (table,) = detect.read_log(run.parent)
    assert table.format == "run"


def test_run_without_rows_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "run", info={}, on_failure=pytest.fail).close()
    with pytest.raises(UnreadableInput, match="nothing was recorded yet"):
        detect.read_log(tmp_path / "run")


def test_other_folders_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"name": "of another tool"}')
    assert not surefoot_run.is_run_dir(tmp_path)
    assert not surefoot_run.is_run_dir(tmp_path / "missing")

"""A folder with several log files of one run is read as one run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.formats import detect
from surefoot.logs.symptoms.extract_curves import extract_curves

LOSS = 2 + 8 * np.exp(-np.arange(2000) / 200)


def piece(file: Path, first: int, last: int, above: float = 0.0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"step": step, "loss": round(float(LOSS[step]) + above, 5)} for step in range(first, last))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_consecutive_pieces_are_one_run(tmp_path: Path) -> None:
    for number in range(11):  # log_10 comes after log_9
        piece(tmp_path / f"log_{number}.jsonl", 100 * number, 100 * number + 100)
    (table,) = detect.read_log(tmp_path)
    (run,) = extract_curves(table)
    np.testing.assert_array_equal(run.loss.steps, np.arange(1100))
    assert any("joined 11 files" in note for note in table.notes)


def test_steps_repeated_after_a_restart_count_once(tmp_path: Path) -> None:
    piece(tmp_path / "attempt_1" / "log.jsonl", 0, 900)
    piece(tmp_path / "attempt_2" / "log.jsonl", 800, 1300)
    piece(tmp_path / "attempt_3" / "log.jsonl", 700, 2000)
    (table,) = detect.read_log(tmp_path)
    (run,) = extract_curves(table)
    np.testing.assert_array_equal(run.loss.steps, np.arange(2000))


def test_jump_between_two_pieces_is_found(tmp_path: Path) -> None:
    piece(tmp_path / "log_0.jsonl", 0, 1500)
    piece(tmp_path / "log_1.jsonl", 1500, 1600, above=8.0)
    diagnosis = diagnose(tmp_path)
    assert (diagnosis.verdict, diagnosis.pattern, diagnosis.onset_step) == ("failed", "jump", 1500)


def test_runs_that_start_at_zero_are_not_joined(tmp_path: Path) -> None:
    piece(tmp_path / "log_0.jsonl", 0, 300)
    piece(tmp_path / "log_1.jsonl", 0, 500)
    (table,) = detect.read_log(tmp_path)
    assert len(table.columns["loss"]) == 500
    assert any("other logs: log_0.jsonl" in note for note in table.notes)

"""Folders that contain logs among weights, code, data and older logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.logs.formats import detect
from surefoot.logs.log_diagnosis import UnreadableInput


def state(folder: Path, points: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": n, "loss": 1.0 / (n + 1), "epoch": n} for n in range(points)]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": points, "log_history": rows}))


def table_csv(file: Path, points: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("step,loss\n" + "".join(f"{n},{1.0 / (n + 1)}\n" for n in range(points)))


def test_newest_checkpoint_has_the_whole_history(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        state(tmp_path / f"checkpoint-{step}", step)
    (table,) = detect.read_log(tmp_path)
    assert table.format == "trainer_state"
    assert len(table.columns["loss"]) == 100
    assert table.path.endswith("checkpoint-100/trainer_state.json")
    assert not any("also" in note for note in table.notes)


def test_log_with_the_most_losses_is_used_and_the_others_are_noted(tmp_path: Path) -> None:
    table_csv(tmp_path / "version_0" / "metrics.csv", 20)
    table_csv(tmp_path / "version_1" / "metrics.csv", 50)
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    (table,) = detect.read_log(tmp_path)
    assert len(table.columns["loss"]) == 50
    assert any("version_1/metrics.csv" in note and "version_0/metrics.csv (20)" in note for note in table.notes)


def test_other_files_are_ignored(tmp_path: Path) -> None:
    for name in (".git", "venv", "data", "node_modules", ".hidden"):
        table_csv(tmp_path / name / "metrics.csv", 500)
    (tmp_path / "train.py").write_text("loss = 0.5\n" * 100)
    (tmp_path / "config.json").write_text('{"loss": [1, 2, 3]}')
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    table_csv(tmp_path / "logs" / "run.csv", 10)
    (table,) = detect.read_log(tmp_path)
    assert table.path.endswith("run.csv")


def test_exception_in_a_console_log_is_combined_with_the_metrics_file(tmp_path: Path) -> None:
    table_csv(tmp_path / "metrics.csv", 30)
    (tmp_path / "slurm-17.err").write_text(
        "Traceback (most recent call last):\n  File 'a.py', line 1, in f\n"
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    )
    (table,) = detect.read_log(tmp_path)
    assert table.format == "csv"
    assert "OutOfMemoryError" in table.tail


def test_folder_without_logs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("nothing here")
    with pytest.raises(UnreadableInput, match="no readable log"):
        detect.read_log(tmp_path)


def test_folder_of_weights_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(UnreadableInput, match=r"pass .*model\.safetensors"):
        detect.read_log(tmp_path)


def test_symlink_loop_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(tmp_path)
    table_csv(tmp_path / "metrics.csv", 5)
    (tmp_path / "gone.csv").symlink_to(tmp_path / "nowhere.csv")
    (table,) = detect.read_log(tmp_path)
    assert table.records == 5

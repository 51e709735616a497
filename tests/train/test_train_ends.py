"""Runs that do not finish: exit code and message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import newest_tensors, same, small_recipe

import surefoot
from surefoot.cli.train import show
from surefoot.train import exit_codes


def failing(folder: Path, how: str, **sections: Any) -> str:
    loss = {"factory": "custom_parts:failing", "at": 10, "how": how, "folder": str(folder)}
    return small_recipe(folder, loss=loss, **sections)


def test_signal_saves_the_run_and_the_same_command_resumes_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = failing(tmp_path, "signal")
    assert show(recipe, ()) == exit_codes.RESTART
    assert (
        "Received SIGTERM. Run the same command again to continue from the newest checkpoint."
        in capsys.readouterr().err
    )
    assert show(recipe, ()) == exit_codes.DONE
    assert "resuming from 10" in capsys.readouterr().out
    assert show(small_recipe(tmp_path / "uninterrupted"), ()) == exit_codes.DONE
    assert same(newest_tensors(tmp_path / "run"), newest_tensors(tmp_path / "uninterrupted" / "run"))


def test_stopped_run_exits_with_the_do_not_restart_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = failing(tmp_path, "nan", steps=40, protection={"policy": {"max_consecutive_vetoes": 1}})
    assert show(recipe, ()) == exit_codes.DO_NOT_RESTART
    assert "A restart would end the same way" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # as under a launcher that always restarts
    assert show(recipe, ()) == exit_codes.DO_NOT_RESTART
    assert not capsys.readouterr().out


def test_out_of_memory_is_reported_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(failing(tmp_path, "memory", protection={"mode": "observe"}), ()) == exit_codes.FAILED
    stderr = capsys.readouterr().err
    assert "Lower batch.size" in stderr
    assert "Traceback" not in stderr


def test_user_error_shows_a_traceback_and_the_sweep_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(failing(tmp_path, "error"), ("steps=[12, 9]",), as_json=True) == exit_codes.FAILED
    out, stderr = capsys.readouterr()
    assert [run["code"] for run in json.loads(out)] == [1, 0]
    assert "custom_parts.py" in stderr
    assert "surefoot train: ZeroDivisionError" in stderr


def test_run_can_be_read_after_an_error(tmp_path: Path) -> None:
    assert show(failing(tmp_path, "error"), ()) == exit_codes.FAILED
    assert surefoot.read(tmp_path / "run").scalars["step"].tolist() == list(range(9))

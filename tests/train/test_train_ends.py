"""How a run ends that does not come to its end: a number, and words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import same, saved, small

import surefoot
from surefoot.cli.train import show
from surefoot.train import exit_codes


def failing(folder: Path, how: str, **sections: Any) -> str:
    loss = {"factory": "own_parts:failing", "at": 10, "how": how, "folder": str(folder)}
    return small(folder, loss=loss, **sections)


def test_a_signal_saves_the_run_and_the_same_command_goes_on_to_the_same_weights(
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
    assert show(small(tmp_path / "whole"), ()) == exit_codes.DONE
    assert same(saved(tmp_path / "run"), saved(tmp_path / "whole" / "run"))


def test_a_run_that_surefoot_stops_asks_not_to_be_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = failing(tmp_path, "nan", steps=40, protection={"policy": {"max_consecutive_vetoes": 1}})
    assert show(recipe, ()) == exit_codes.DO_NOT_RESTART
    assert "A restart would end the same way" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # as a launcher does that starts again whatever ends
    assert show(recipe, ()) == exit_codes.DO_NOT_RESTART
    assert not capsys.readouterr().out


def test_memory_that_runs_out_is_told_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(failing(tmp_path, "memory"), ()) == exit_codes.FAILED
    told = capsys.readouterr().err
    assert "Lower batch.size" in told
    assert "Traceback" not in told


def test_an_error_of_ones_own_code_is_shown_in_full_and_the_other_runs_of_a_sweep_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(failing(tmp_path, "error"), ("steps=[12, 9]",), as_json=True) == exit_codes.FAILED
    out, words = capsys.readouterr()
    assert [each["code"] for each in json.loads(out)] == [1, 0]
    assert "own_parts.py" in words
    assert "surefoot train: ZeroDivisionError" in words


def test_after_an_error_the_run_can_be_read(tmp_path: Path) -> None:
    assert show(failing(tmp_path, "error"), ()) == exit_codes.FAILED
    assert surefoot.read(tmp_path / "run").scalars["step"].tolist() == list(range(9))

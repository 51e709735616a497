"""A loop of one's own that runs out of memory: the error passes, the run is saved and resumes exactly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from out_of_memory_loop import FAILS_AT, STEPS, Loop
from torch import Tensor

import surefoot
from surefoot.checkpoint.store import CheckpointStore


def final_state(loop: Loop) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in loop.model.state_dict().items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    loop = Loop(tmp_path_factory.mktemp("uninterrupted"))
    with loop.guard:
        loop.train()
    return final_state(loop)


def assert_resumes_exactly(run: Path, uninterrupted: dict[str, Tensor]) -> None:
    loop = Loop(run)
    assert loop.guard.step == FAILS_AT
    with loop.guard:
        loop.train()
    assert all(torch.equal(value, uninterrupted[name]) for name, value in final_state(loop).items())
    assert surefoot.read(run).scalars["step"].tolist() == list(range(STEPS))


@pytest.mark.parametrize("place", ["forward", "host"])
def test_error_passes_and_the_run_is_saved_and_explained(
    tmp_path: Path, place: str, uninterrupted: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, place)
    with pytest.raises(RuntimeError, match=r"CUDA out of memory|can't allocate memory"), loop.guard:
        loop.train()
    messages = [record.getMessage() for record in caplog.records if "Out of memory" in record.getMessage()]
    assert len(messages) == 1
    assert f"The run is saved as it was before that update, at step {FAILS_AT}." in messages[0]
    assert "Use a smaller batch, with accumulation" in messages[0]
    diagnosis = next(e for e in surefoot.read(tmp_path).events if e["kind"] == "diagnosis")
    assert (diagnosis["cause"], diagnosis["evidence"]["saved"]) == ("out_of_memory", True)
    assert_resumes_exactly(tmp_path, uninterrupted)


def test_weights_half_way_between_two_updates_are_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path, "step")
    with pytest.raises(torch.OutOfMemoryError), loop.guard:
        loop.train()
    assert "Out of memory in optimizer.step()" in caplog.text
    assert "half-way between two updates" in caplog.text
    assert not CheckpointStore(tmp_path / "checkpoints").all()


def test_without_resume_the_user_is_told_how_to_have_runs_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, "forward", resume=False)
    with pytest.raises(torch.OutOfMemoryError), loop.guard:
        loop.train()
    assert "attach(..., resume=True) saves runs" in caplog.text


@pytest.mark.parametrize("end", ["exit", "close"])
def test_script_without_a_context_manager_is_saved_too(
    tmp_path: Path, end: str, uninterrupted: dict[str, Tensor]
) -> None:
    script = Path(__file__).with_name("out_of_memory_loop.py")
    command = [sys.executable, str(script), str(tmp_path), "forward", end]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert f"The run is saved as it was before that update, at step {FAILS_AT}." in done.stderr
    assert_resumes_exactly(tmp_path, uninterrupted)


def test_another_error_saves_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path, "forward")
    with pytest.raises(ZeroDivisionError), loop.guard:
        try:
            loop.train()
        except torch.OutOfMemoryError:
            1 // 0  # noqa: B018
    assert not CheckpointStore(tmp_path / "checkpoints").all()

"""At every moment of a run, a signal saves the run and ends the process with 128 + its number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.checkpoint.store import CheckpointStore

ExitCodeOf = Callable[..., int]


@pytest.fixture(scope="module")
def exit_code_of() -> Iterator[ExitCodeOf]:
    command = [sys.executable, str(Path(__file__).with_name("signalled_runs.py"))]
    pipe, env = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, replies = process.stdin, process.stdout

        def run_and_wait(run: Path, moment: str, first: int, second: int = 0) -> int:
            to.write(f"{run} {moment} {int(first)} {int(second)}\n")
            return int(replies.readline())

        yield run_and_wait
        to.close()


def newest_step(run: Path) -> int:
    return max(kept.step for kept in CheckpointStore(run / "checkpoints").all())


@pytest.mark.parametrize("moment", ["first", "fetched", "backward", "evaluation", "closing"])
def test_sigterm_at_any_moment_saves_the_run_and_exits_with_143(
    tmp_path: Path, exit_code_of: ExitCodeOf, moment: str
) -> None:
    assert exit_code_of(tmp_path, moment, signal.SIGTERM) == 143
    assert newest_step(tmp_path) > 0


@pytest.mark.parametrize("moment", ["stepped", "late"])
def test_second_signal_changes_nothing(tmp_path: Path, exit_code_of: ExitCodeOf, moment: str) -> None:
    assert exit_code_of(tmp_path, moment, signal.SIGTERM, signal.SIGTERM) == 143
    assert newest_step(tmp_path) > 0


def test_sighup_exits_with_129(tmp_path: Path, exit_code_of: ExitCodeOf) -> None:
    assert exit_code_of(tmp_path, "backward", signal.SIGHUP) == 129
    assert newest_step(tmp_path) > 0


def test_sigint_ends_the_process_as_python_does(tmp_path: Path, exit_code_of: ExitCodeOf) -> None:
    assert exit_code_of(tmp_path, "backward", signal.SIGINT) == -signal.SIGINT
    assert newest_step(tmp_path) > 0


def test_run_without_a_signal_exits_with_0(tmp_path: Path, exit_code_of: ExitCodeOf) -> None:
    assert exit_code_of(tmp_path, "never", 0) == 0
    assert newest_step(tmp_path) == 30

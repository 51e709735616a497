"""How a process ends on a signal is the same at every moment of a run: 128 + its number, after the run was saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.checkpoint.store import CheckpointStore

End = Callable[..., int]


@pytest.fixture(scope="module")
def end() -> Iterator[End]:
    command = [sys.executable, str(Path(__file__).with_name("signalled_runs.py"))]
    pipe, env = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = process.stdin, process.stdout

        def ended(run: Path, moment: str, first: int, second: int = 0) -> int:
            to.write(f"{run} {moment} {int(first)} {int(second)}\n")
            return int(answers.readline())

        yield ended
        to.close()


def saved(run: Path) -> int:
    return max(kept.step for kept in CheckpointStore(run / "checkpoints").all())


@pytest.mark.parametrize("moment", ["first", "fetched", "backward", "evaluation", "closing"])
def test_terminated_at_any_moment_a_run_is_saved_and_ends_with_143(tmp_path: Path, end: End, moment: str) -> None:
    assert end(tmp_path, moment, signal.SIGTERM) == 143
    assert saved(tmp_path) > 0


@pytest.mark.parametrize("moment", ["stepped", "late"])
def test_a_second_signal_changes_nothing(tmp_path: Path, end: End, moment: str) -> None:
    assert end(tmp_path, moment, signal.SIGTERM, signal.SIGTERM) == 143
    assert saved(tmp_path) > 0


def test_a_terminal_that_is_closed(tmp_path: Path, end: End) -> None:
    assert end(tmp_path, "backward", signal.SIGHUP) == 129
    assert saved(tmp_path) > 0


def test_an_interrupt_is_pythons_own(tmp_path: Path, end: End) -> None:
    assert end(tmp_path, "backward", signal.SIGINT) == -signal.SIGINT
    assert saved(tmp_path) > 0


def test_nothing_came(tmp_path: Path, end: End) -> None:
    assert end(tmp_path, "never", 0) == 0
    assert saved(tmp_path) == 30

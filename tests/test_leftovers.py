"""A pytest run that leaves a process behind fails, and a killed one leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from child_processes import MARK, started, supported

pytestmark = pytest.mark.skipif(not supported(), reason="processes are found in Linux's /proc")

QUICK = """
import functools, leftovers
leftovers.gone = functools.partial(leftovers.gone, seconds=0.5)
"""
LEAVES = """
import subprocess, sys, time
from pathlib import Path

STARTER = '''
import subprocess, sys
nothing = subprocess.DEVNULL
other = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=nothing, stderr=nothing)
print(other.pid)
'''

def test_a_process_in_a_session_of_its_own_whose_parent_is_gone():
    done = subprocess.run([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, check=True)
    Path("pids").write_text(done.stdout)
"""
CLEAN = """
import multiprocessing, subprocess
from concurrent.futures import ProcessPoolExecutor

def test_processes_that_are_waited_for():
    subprocess.run(["true"], check=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(abs, -1).result() == 1
"""
HANGS = """
import os, time
from pathlib import Path
from test_leaves import test_a_process_in_a_session_of_its_own_whose_parent_is_gone as leave

def test_hangs():
    leave()
    if not (forked := os.fork()):
        time.sleep(600)
    with Path("pids").open("a") as file:
        file.write(f"{forked}\\n")
    Path("ready").touch()
    time.sleep(600)
"""


def command(*options: str) -> list[str]:
    fixed_options = [
        "-W",
        "ignore::pytest.PytestWarning",
        "-p",
        "quick",
        "-p",
        "leftovers",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
    ]
    return [sys.executable, "-m", "pytest", *fixed_options, *options]


def environment(folder: Path) -> dict[str, str]:
    """Environment for a separate test run that is not part of this one."""
    for name, text in {"quick": QUICK, "test_leaves": LEAVES, "test_clean": CLEAN, "test_hangs": HANGS}.items():
        (folder / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {name: value for name, value in os.environ.items() if name != MARK} | {"PYTHONPATH": path}


def runs(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "waited for 60 s"
        time.sleep(0.05)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_test_that_leaves_a_process_behind_fails_and_the_process_is_killed(tmp_path: Path, workers: str) -> None:
    pytest_command = command("-n", workers, "test_leaves.py", "test_clean.py")
    done = subprocess.run(
        pytest_command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    assert "test_leaves.py left processes behind, now killed:" in done.stdout
    assert "sleep 600" in done.stdout
    assert "2 passed, 1 error" in done.stdout.splitlines()[-1], done.stdout
    assert not any(runs(pid) for pid in (tmp_path / "pids").read_text().split())


def test_clean_test_run_passes(tmp_path: Path) -> None:
    pytest_command = command("test_clean.py")
    done = subprocess.run(
        pytest_command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("workers", ["0", "1"])
def test_killed_pytest_leaves_no_process_behind(tmp_path: Path, workers: str, number: signal.Signals) -> None:
    with started(command("-n", workers, "test_hangs.py"), cwd=tmp_path, env=environment(tmp_path)) as run:
        until((tmp_path / "ready").exists)
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 2
        assert all(runs(pid) for pid in pids)
        run.send_signal(number)
        run.wait(60)
        until(lambda: not any(runs(pid) for pid in pids))

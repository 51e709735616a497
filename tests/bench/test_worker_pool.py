"""The worker pool runs every task, and its workers end with a killed benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.checkout import worker_env
from benchmarks.worker_pool import run_unordered

SCRIPT = """
import os, sys, time
from pathlib import Path
from benchmarks.worker_pool import run_unordered

def sleep(k):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    list(run_unordered(sleep, range(4), 2))
"""


def test_every_task_runs_once() -> None:
    assert sorted(run_unordered(str, list(range(5)), 2)) == ["0", "1", "2", "3", "4"]
    assert list(run_unordered(str, [], 2)) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for running processes in /proc")
def test_workers_end_with_a_killed_benchmark(tmp_path: Path) -> None:
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    pids.mkdir()
    bench = subprocess.Popen([sys.executable, script, pids], cwd=tmp_path, env=worker_env())
    try:
        _wait_until(lambda: len(os.listdir(pids)) == 2)
    finally:
        bench.kill()
        bench.wait()
    _wait_until(lambda: not any(_runs(pid) for pid in os.listdir(pids)))


def _runs(pid: str) -> bool:
    try:
        return b"spawn_main" in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for 60 s"
        time.sleep(0.05)

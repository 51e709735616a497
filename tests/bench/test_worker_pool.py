"""Runs made side by side: each is made, and none goes on when the bench is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.worker_pool import each

MAKING = """
import os, sys, time
from pathlib import Path
from benchmarks.worker_pool import each

def make(k):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    list(each(make, range(4), 2))
"""


def test_each_is_made_once() -> None:
    assert sorted(each(str, list(range(5)), 2)) == ["0", "1", "2", "3", "4"]
    assert list(each(str, [], 2)) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc for what still runs")
def test_what_it_had_started_ends_with_a_killed_bench(tmp_path: Path) -> None:
    script, made = tmp_path / "making.py", tmp_path / "made"
    script.write_text(MAKING)
    made.mkdir()
    bench = subprocess.Popen([sys.executable, script, made])
    try:
        _until(lambda: len(os.listdir(made)) == 2)
    finally:
        bench.kill()
        bench.wait()
    _until(lambda: not any(_runs(pid) for pid in os.listdir(made)))


def _runs(pid: str) -> bool:
    try:
        return b"spawn_main" in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False


def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.05)

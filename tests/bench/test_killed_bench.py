"""A bench that is killed takes along what it started: ranks, victims, and what torchrun started for it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from child_processes import MARK, marked, started, supported

pytestmark = pytest.mark.skipif(not supported(), reason="processes are found in Linux's /proc")

RANKS = """
import sys
from benchmarks.zoo.jobs import BARE, Job, everything
name = next(id for id in everything() if id.startswith("nan_on_one_rank"))
Job(name, BARE, sys.argv[1]).do()
"""
VICTIMS = """
import sys, time
from benchmarks.chaos.fork_server import Nursery
from benchmarks.chaos.training_run import Plan
with Nursery() as nursery:
    nursery.team(Plan(run=sys.argv[1] + "/run", steps=10**6, pause=0.1, spread="ddp"), 2)
    time.sleep(600)
"""
TORCHRUN = """
import signal, sys
from pathlib import Path
from benchmarks.chaos.trials import Bench
from benchmarks.chaos.interruptions import _signalled
from benchmarks.chaos.fork_server import Nursery
from benchmarks.chaos.training_run import Plan
with Nursery() as nursery:
    plan = Plan(run=sys.argv[1] + "/run", steps=10**6, pause=10.0, spread="ddp")
    _signalled(Bench(Path(sys.argv[1]), nursery), plan, 2, signal.SIGTERM, torchrun=True)
"""
BENCHES = {
    "ranks": (RANKS, "*/store", 3),
    "victims": (VICTIMS, "run.begun-*", 4),
    "torchrun": (TORCHRUN, "run.begun-*", 5),
}
"""The program, a file that its processes make when they are at work, and how many processes there are then."""


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < limit, "waited for 90 s"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("name", BENCHES)
def test_no_process_outlives_a_killed_bench(name: str, number: signal.Signals, tmp_path: Path) -> None:
    program, made, several = BENCHES[name]
    mark = f"{os.environ[MARK]}-bench"
    env = os.environ | {MARK: mark, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with started([sys.executable, "-c", program, str(tmp_path)], env=env) as bench:
        until(lambda: any(tmp_path.glob(made)) and len(marked(mark)) >= several)
        others = marked(mark) - {bench.pid}
        for pid in others if name == "ranks" else ():
            os.kill(pid, signal.SIGSTOP)  # as one that waits in a collective, it would not end by itself
        bench.send_signal(number)
        bench.wait(60)
        until(lambda: not marked(mark))


def test_the_victims_of_a_killed_nursery_end_too(tmp_path: Path) -> None:
    mark = f"{os.environ[MARK]}-bench"
    env = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}
    with started([sys.executable, "-c", VICTIMS, str(tmp_path)], env=env) as bench:
        until(lambda: len(list(tmp_path.glob("run.begun-*"))) == 2)
        nursery = next(pid for pid in marked(mark) if _parent(pid) == bench.pid)
        os.kill(nursery, signal.SIGKILL)
        until(lambda: marked(mark) == {bench.pid})


def _parent(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()[1])

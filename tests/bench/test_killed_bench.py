"""A killed benchmark takes its processes with it: ranks, training processes, and torchrun's workers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from child_processes import MARK, marked, started, supported

from benchmarks.checkout import worker_env

pytestmark = pytest.mark.skipif(not supported(), reason="processes are found in Linux's /proc")

RANKS = """
import sys
from benchmarks.zoo.jobs import BARE, ZooJob, all_scenarios
name = next(id for id in all_scenarios() if id.startswith("nan_on_one_rank"))
ZooJob(name, BARE, sys.argv[1]).run()
"""
FORKED = """
import sys, time
from benchmarks.chaos.fork_server import ForkServer
from benchmarks.chaos.training_run import RunPlan
with ForkServer() as server:
    server.start_ranks(RunPlan(run=sys.argv[1] + "/run", steps=10**6, pause=0.1, strategy="ddp"), 2)
    time.sleep(600)
"""
TORCHRUN = """
import signal, sys
from pathlib import Path
from benchmarks.chaos.trials import ChaosBench
from benchmarks.chaos.interruptions import signal_once
from benchmarks.chaos.fork_server import ForkServer
from benchmarks.chaos.training_run import RunPlan
with ForkServer() as server:
    plan = RunPlan(run=sys.argv[1] + "/run", steps=10**6, pause=10.0, strategy="ddp")
    signal_once(ChaosBench(Path(sys.argv[1]), server), plan, 2, signal.SIGTERM, torchrun=True)
"""
BENCHES = {
    "ranks": (RANKS, "*/store", 3),
    "forked": (FORKED, "run.begun-*", 4),
    "torchrun": (TORCHRUN, "run.begun-*", 5),
}
"""The program, a file that its processes create once they train, and how many processes there are by then."""


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < limit, "waited for 90 s"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("name", BENCHES)
def test_no_process_outlives_a_killed_benchmark(name: str, number: signal.Signals, tmp_path: Path) -> None:
    program, made, several = BENCHES[name]
    mark = f"{os.environ[MARK]}-bench"
    env = worker_env(TMPDIR=str(tmp_path), OMP_NUM_THREADS="1") | {MARK: mark}
    with started([sys.executable, "-c", program, str(tmp_path)], env=env) as bench:
        until(lambda: any(tmp_path.glob(made)) and len(marked(mark)) >= several)
        others = marked(mark) - {bench.pid}
        for pid in others if name == "ranks" else ():
            os.kill(pid, signal.SIGSTOP)  # like a rank that waits in a collective, it cannot end by itself
        bench.send_signal(number)
        bench.wait(60)
        until(lambda: not marked(mark))


def test_children_of_a_killed_fork_server_end_too(tmp_path: Path) -> None:
    mark = f"{os.environ[MARK]}-bench"
    env = worker_env(OMP_NUM_THREADS="1") | {MARK: mark}
    with started([sys.executable, "-c", FORKED, str(tmp_path)], env=env) as bench:
        until(lambda: len(list(tmp_path.glob("run.begun-*"))) == 2)
        server = next(pid for pid in marked(mark) if _parent(pid) == bench.pid)
        os.kill(server, signal.SIGKILL)
        until(lambda: marked(mark) == {bench.pid})


def _parent(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()[1])

"""Work done behind the training's back is done once, and is there when it is asked for."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from surefoot.background import BackgroundTask, BackgroundWorker


def test_it_is_done_once_by_whoever_comes_first() -> None:
    by: list[str] = []
    errand = BackgroundTask(lambda: by.append(threading.current_thread().name))
    threads = [threading.Thread(target=errand.run, name=f"thread {k}") for k in range(4)]
    for t in threads:
        t.start()
    errand.result()
    for t in threads:
        t.join()
    assert len(by) == 1


def test_who_asks_waits_for_the_thread_that_is_at_it() -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go.wait(10)
        return threading.current_thread().name

    errand = BackgroundWorker("helper").submit(work)
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    assert errand.result() == "helper"


def test_who_asks_does_it_himself_while_the_thread_is_busy() -> None:
    begun, go = threading.Event(), threading.Event()
    runner = BackgroundWorker("helper")

    def busy() -> None:
        begun.set()
        go.wait(10)

    first = runner.submit(busy)
    assert begun.wait(10)
    assert runner.submit(lambda: threading.current_thread().name).result() == threading.current_thread().name
    go.set()
    first.result()


def test_an_error_comes_out_where_the_result_is_asked_for() -> None:
    runner = BackgroundWorker("helper")
    errand = runner.submit(lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            errand.result()
    assert runner.submit(lambda: 7).result() == 7


def test_nothing_is_left_of_a_runner_nor_of_what_it_worked_on() -> None:
    class Thing:
        pass

    runner, thing = BackgroundWorker("short-lived"), Thing()
    seen = weakref.ref(thing)
    runner.submit(lambda kept=thing: kept).result()
    del thing
    until = time.monotonic() + 10
    while seen() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert seen() is None
    del runner
    gc.collect()
    while any(t.name == "short-lived" for t in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.001)
    assert not any(t.name == "short-lived" for t in threading.enumerate())


ENDS = """
import time
import torch
from surefoot.background import BackgroundWorker, ProcessExiting, raise_if_exiting

def work():
    try:
        for _ in range(10_000):
            values.add_(1)  # most of the time is spent in C++
            raise_if_exiting()
    except ProcessExiting:
        print("cut short", flush=True)
        raise

values, runner = torch.zeros(1 << 24), BackgroundWorker("helper")
first = runner.submit(work)
runner.submit(lambda: print("begun too late", flush=True))
while not values[0]:
    time.sleep(0.01)
print("over", flush=True)
"""


def test_a_process_that_ends_while_something_is_being_made_ends_well() -> None:
    """A thread that comes back from C++ to an interpreter that is gone would take the process down."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split("\n"), done.stderr) == (0, ["over", "cut short", ""], "")


EXCHANGED = """
import os, sys
import torch
import torch.distributed as dist
import surefoot.background

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
group = dist.group.WORLD  # someone still knows it when it is destroyed
core = min(os.sched_getaffinity(0))
for thread in map(int, os.listdir("/proc/self/task")):  # on a busy machine the group's threads come late
    os.sched_setaffinity(thread, {core})
    if "gloo" in open(f"/proc/self/task/{thread}/comm").read():
        os.setpriority(os.PRIO_PROCESS, thread, 3)
sys.setswitchinterval(10)
for tensor in [torch.ones(1000) for _ in range(64)]:
    dist.all_reduce(tensor)
del tensor
dist.destroy_process_group()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are told apart as Linux names them")
def test_a_process_that_exchanged_tensors_last_thing_ends_well(tmp_path: Path) -> None:
    """Torch's threads would give them back to an interpreter that is gone: without care most such pairs abort."""
    for k in range(4):
        command = [sys.executable, "-c", EXCHANGED]
        pair = [
            subprocess.Popen([*command, str(rank), str(tmp_path / f"store{k}")], stderr=subprocess.PIPE)
            for rank in (0, 1)
        ]
        assert [(process.communicate(timeout=120)[1], process.returncode) for process in pair] == [(b"", 0)] * 2

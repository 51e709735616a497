"""Background tasks run once, and the process exits cleanly whatever they are doing."""

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


def test_task_runs_once_in_the_first_thread_that_needs_it() -> None:
    thread_names: list[str] = []
    task = BackgroundTask(lambda: thread_names.append(threading.current_thread().name))
    threads = [threading.Thread(target=task.run, name=f"thread {k}") for k in range(4)]
    for t in threads:
        t.start()
    task.result()
    for t in threads:
        t.join()
    assert len(thread_names) == 1


def test_result_waits_for_the_thread_that_runs_the_task() -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go.wait(10)
        return threading.current_thread().name

    task = BackgroundWorker("helper").submit(work)
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    assert task.result() == "helper"


def test_result_runs_the_task_itself_while_the_worker_is_busy() -> None:
    begun, go = threading.Event(), threading.Event()
    worker = BackgroundWorker("helper")

    def busy() -> None:
        begun.set()
        go.wait(10)

    first = worker.submit(busy)
    assert begun.wait(10)
    assert worker.submit(lambda: threading.current_thread().name).result() == threading.current_thread().name
    go.set()
    first.result()


def test_result_raises_the_error_of_the_task() -> None:
    worker = BackgroundWorker("helper")
    task = worker.submit(lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            task.result()
    assert worker.submit(lambda: 7).result() == 7


def test_worker_and_its_tasks_are_garbage_collected() -> None:
    class Thing:
        pass

    worker, thing = BackgroundWorker("short-lived"), Thing()
    seen = weakref.ref(thing)
    worker.submit(lambda captured=thing: captured).result()
    del thing
    until = time.monotonic() + 10
    while seen() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert seen() is None
    del worker
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

values, worker = torch.zeros(1 << 24), BackgroundWorker("helper")
first = worker.submit(work)
worker.submit(lambda: print("begun too late", flush=True))
while not values[0]:
    time.sleep(0.01)
print("over", flush=True)
"""


def test_process_exit_during_a_task_is_clean() -> None:
    """A thread that returns from C++ after the interpreter has shut down would crash the process."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split("\n"), done.stderr) == (0, ["over", "cut short", ""], "")


EXCHANGED = """
import os, sys
import torch
import torch.distributed as dist
import surefoot.background

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
group = dist.group.WORLD  # a reference survives its destruction
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are recognised by their Linux names")
def test_process_exit_after_a_collective_is_clean(tmp_path: Path) -> None:
    """Torch's threads would release tensors into a finalized interpreter: unhandled, most such pairs abort."""
    for k in range(4):
        command = [sys.executable, "-c", EXCHANGED]
        pair = [
            subprocess.Popen([*command, str(rank), str(tmp_path / f"store{k}")], stderr=subprocess.PIPE)
            for rank in (0, 1)
        ]
        assert [(process.communicate(timeout=120)[1], process.returncode) for process in pair] == [(b"", 0)] * 2

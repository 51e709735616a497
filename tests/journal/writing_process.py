"""Run as a program: a writer that the tests start, kill and race. Prints "ready" when it has started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from surefoot.journal import Journal, JournalLimits, RunDirectoryInUse
from surefoot.journal.lock import WriterLock
from surefoot.records import LAYER_STATS, Note, StepMetrics, Verdict


def write(run_dir: str) -> None:
    """Write rows, layers and events forever; the layer row of attempt `a` is filled with `a` to detect mix-ups."""
    limits = JournalLimits(window=100, budget=100_000, heartbeat=0.05, sync_seconds=0.05)
    journal = Journal(run_dir, info={}, on_failure=lambda reason: print(reason, flush=True), limits=limits)
    attempt = journal.last_attempt
    while True:
        attempt += 1
        if attempt % 400 == 0 or attempt == journal.last_attempt + 1:
            tensors = 3 + attempt // 400 % 2
            journal.layout([f"w{tensor}" for tensor in range(tensors)], [8] * tensors)
        verdict = Verdict.NONFINITE if attempt % 100 == 99 else Verdict.APPLIED
        layers = np.full((tensors, len(LAYER_STATS)), attempt, np.float32)
        journal.row(StepMetrics(step=attempt, attempt=attempt, time=time.time(), loss=attempt, verdict=verdict), layers)
        if attempt % 5 == 0:
            journal.event(Note(step=attempt, attempt=attempt, name="fifth"))
        if attempt == journal.last_attempt + 20:
            print("ready", flush=True)
        time.sleep(0.0002)


def contend() -> None:
    """Try to acquire the lock of each run directory read from stdin, and keep it until stdin ends."""
    locks: list[WriterLock] = []
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            locks.append(WriterLock(Path(line.strip()), interval=0.1).acquire())
            print("won", flush=True)
        except RunDirectoryInUse as error:
            print(f"lost: {error}", flush=True)
    print(sum(lock.is_held() for lock in locks), flush=True)


def fork(run_dir: str) -> None:
    """A forked child, such as a DataLoader worker, must neither write nor release the parent's lock."""
    journal = Journal(run_dir, info={}, on_failure=print)
    journal.event(Note(step=0, attempt=0, name="parent"))
    child = os.fork()
    if child == 0:
        journal.event(Note(step=0, attempt=0, name="child"))
        journal.row(StepMetrics(step=0, attempt=0, time=0.0))
        assert not journal.flush()
        journal.close()
        sys.exit(0)  # runs the exit handlers, unlike a multiprocessing child
    assert os.waitpid(child, 0)[1] == 0
    assert (Path(run_dir) / "writer.lock").exists()
    journal.event(Note(step=1, attempt=1, name="parent"))
    print("ready", flush=True)  # no close(): exiting must flush and release by itself


if __name__ == "__main__":
    {"write": write, "contend": contend, "fork": fork}[sys.argv[1]](*sys.argv[2:])

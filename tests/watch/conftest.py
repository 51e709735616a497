"""Runs to watch: made by a journal, and a real small training in a process of its own."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.journal import Journal, JournalLimits
from surefoot.records import LAYER_STATS, Event, StepMetrics, Verdict

SCRIPT = Path(__file__).with_name("training_run.py")


def append_rows(
    journal: Journal, attempts: range, *, loss: dict[int, float] | None = None, layers: int = 3, **values: Any
) -> None:
    """Rows with a loss that falls from 2; `loss` has the exceptions."""
    for attempt in attempts:
        value = (loss or {}).get(attempt, 1 + 1 / (1 + attempt / 50))
        verdict = Verdict.APPLIED if math.isfinite(value) else Verdict.NONFINITE
        numbers = {"norm": 0.5, "lr": 1e-3, "seconds": 0.1, "samples": 8.0, "memory": 5e8, "data_wait": 0.001} | values
        row = StepMetrics(step=attempt, attempt=attempt, time=1e9 + attempt, loss=value, verdict=verdict, **numbers)
        stats = np.zeros((layers, len(LAYER_STATS)), np.float32)
        stats[:, 0] = 10.0 ** -np.arange(layers)
        journal.row(row, stats)
    assert journal.flush()


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[Callable[..., Journal]]:
    """Opens journals in new run directories below tmp_path; open ones are closed at the end."""
    journals: list[Journal] = []

    def open_one(name: str = "run", *, info: dict[str, Any] | None = None, layers: int = 3) -> Journal:
        limits = JournalLimits(queue_rows=1 << 20)
        journal = Journal(tmp_path / name, info=info or {}, on_failure=pytest.fail, limits=limits)
        journal.layout([f"layer.{at}.weight" for at in range(layers)], [4] * layers)
        journals.append(journal)
        return journal

    yield open_one
    for journal in journals:
        journal.close()


@pytest.fixture
def made_run(open_run: Callable[..., Journal], tmp_path: Path) -> Callable[..., Path]:
    """Writes a whole run of 300 steps, with events if given."""

    def make(name: str = "run", *events: Event, loss: dict[int, float] | None = None, **options: Any) -> Path:
        journal = open_run(name, **options)
        append_rows(journal, range(300), loss=loss)
        for event in events:
            journal.event(event)
        journal.close()
        return tmp_path / name

    return make


class Training:
    """A real training process; `kill` ends it as a crash would, `resume` starts it again."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        command = [sys.executable, str(SCRIPT), str(self.run_dir), "100000", "0.02", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
        wait_for((self.run_dir / "writer.lock").exists)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    process = Training(tmp_path / "live")
    yield process
    process.kill()

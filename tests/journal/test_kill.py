from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from surefoot.journal import Run, read
from surefoot.records import SCHEMA

PROGRAM = Path(__file__).with_name("writing_process.py")


@contextmanager
def started(mode: str, run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PROGRAM), mode, str(run_dir)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def gaps(attempts: Sequence[int] | np.ndarray, step: int = 1) -> int:
    """The number of gaps; attempts must be increasing."""
    assert (np.diff(attempts) > 0).all()
    return np.count_nonzero(np.diff(attempts) > step)


def check(run: Run, *, kills: int) -> None:
    """All rows and events are intact, in order and unique; only the last ones before a kill may be missing."""
    attempts = run.scalars["attempt"]
    assert gaps(attempts) <= kills
    assert run.scalars["loss"].tolist() == attempts.tolist()
    layers = run.layers
    gaps(layers.attempts)
    assert layers["w0"]["norm"].tolist() == layers.attempts.tolist()
    fourth = layers["w3"]["norm"] if "w3" in layers else np.empty(0)
    assert (np.isnan(fourth) | (fourth == layers.attempts[: len(fourth)])).all()
    assert gaps([event["attempt"] for event in run.events], step=5) <= kills
    assert run.info["schema"] == SCHEMA
    assert run.skipped == 0
    assert run.notes == []


def test_a_run_killed_repeatedly_reads_as_one(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = 0
    for kill in range(4):
        with started("write", tmp_path):
            for _ in range(3):  # a live run can be read too
                time.sleep(rng.random() * 0.1)
                check(read(tmp_path), kills=kill)
        run = read(tmp_path)
        check(run, kills=kill)
        assert gaps(run.layers.attempts[-100:]) <= kill
        assert run.scalars.rows > rows
        assert len(run.info["earlier"]) == kill
        rows = run.scalars.rows


def test_a_forked_child_writes_nothing_and_exit_flushes(tmp_path: Path) -> None:
    with started("fork", tmp_path) as process:
        assert process.wait() == 0
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["parent", "parent"]
    assert not (tmp_path / "writer.lock").exists()

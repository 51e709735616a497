"""Each kind of loop, killed five times in five ways: every loss is that of an uninterrupted run, or the user was
warned that it may not be, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from resume_loops import ENDS, KILLS, LOOPS

Ask = Callable[[str], dict[str, Any]]
TOLD = {
    "own_numbers_before_the_fetch_unnamed": "guard.batches(loader)",
    "workers_of_torchdata": "draws in worker processes",
    "batch_drawn_ahead_unnamed": "that batch will be left out after a resume",
}
"""Loops that cannot be exact, with what is said of them."""
UNSURE = ("own_numbers_after_the_fetch_unnamed", "dataset_with_global_generators_unnamed", "no_loader_unnamed")
"""Loops that are exact, of which surefoot cannot know that they are."""


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    command = [sys.executable, str(Path(__file__).with_name("resume_loops.py")), str(tmp_path_factory.mktemp("runs"))]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = process.stdin, process.stdout

        def asked(name: str) -> dict[str, Any]:
            to.write(f"{name}\n")
            return json.loads(answers.readline())

        yield asked
        to.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LOOPS)
def test_losses_after_five_kills(name: str, ask: Ask) -> None:
    came = ask(name)
    assert came["codes"] == [*(ENDS[kill.how] for kill in KILLS), 0], came["log"]
    assert len(came["resumed"]) == len(KILLS) * (2 if name == "two_processes" else 1)
    assert min(came["resumed"]) > 0
    told = "\n".join(came["told"])
    if name in (*TOLD, *UNSURE) and name != "workers_of_torchdata":  # which is told of its workers at once
        assert "between optimizer.step() and the next fetch" in "\n".join(came["at_attach"])
    if name in TOLD:
        assert TOLD[name] in told
        assert TOLD[name] in came["log"]
        return
    assert came["differ"] == [], came["log"]
    assert bool(told) == (name in UNSURE)

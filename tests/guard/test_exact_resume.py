"""Each kind of loop, killed five times in five ways: every loss equals that of an uninterrupted run, or the user was
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

TryLoop = Callable[[str], dict[str, Any]]
WARNED = {
    "own_numbers_before_the_fetch_unnamed": "guard.batches(loader)",
    "workers_of_torchdata": "draws in worker processes",
    "batch_drawn_ahead_unnamed": "that batch will be left out after a resume",
}
"""Loops that cannot resume exactly, with a part of their warning."""
UNSURE = ("own_numbers_after_the_fetch_unnamed", "dataset_with_global_generators_unnamed", "no_loader_unnamed")
"""Loops that resume exactly, although surefoot cannot know and warns."""


@pytest.fixture(scope="module")
def try_loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TryLoop]:
    command = [sys.executable, str(Path(__file__).with_name("resume_loops.py")), str(tmp_path_factory.mktemp("runs"))]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, replies = process.stdin, process.stdout

        def try_loop(name: str) -> dict[str, Any]:
            to.write(f"{name}\n")
            return json.loads(replies.readline())

        yield try_loop
        to.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LOOPS)
def test_losses_after_five_kills(name: str, try_loop: TryLoop) -> None:
    result = try_loop(name)
    assert result["codes"] == [*(ENDS[kill.how] for kill in KILLS), 0], result["log"]
    assert len(result["resumed"]) == len(KILLS) * (2 if name == "two_processes" else 1)
    assert min(result["resumed"]) > 0
    warnings = "\n".join(result["warnings"])
    if name in (*WARNED, *UNSURE) and name != "workers_of_torchdata":  # warned about its workers at attach
        assert "between optimizer.step() and the next fetch" in "\n".join(result["at_attach"])
    if name in WARNED:
        assert WARNED[name] in warnings
        assert WARNED[name] in result["log"]
        return
    assert result["differ"] == [], result["log"]
    assert bool(warnings) == (name in UNSURE)

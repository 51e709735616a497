"""When a save takes longer than the save interval, no rank skips a save."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.chaos.fork_server import ForkServer
from benchmarks.chaos.training_run import RunPlan
from benchmarks.chaos.trials import ChaosBench, checkpoint_events

SOON = 15
"""Steps within which all ranks know that a save has ended and the next one has begun."""


@pytest.mark.parametrize("world", [1, 2])
def test_save_that_falls_due_during_another_begins_when_that_ends(tmp_path: Path, world: int) -> None:
    with ForkServer() as server:
        bench = ChaosBench(tmp_path, server)
        spread = "ddp" if world > 1 else "none"
        plan = RunPlan(
            run=bench.new_run_path("slow"), steps=240, save_every=30, pause=0.01, strategy=spread, disk_fault="slow"
        )
        assert not any(bench.run_to_end(plan, world))
        assert bench.compare(plan, world) == ""
    saves = [(e["values"]["step"], e["step"]) for e in checkpoint_events(plan) if e["name"] == "saved"]
    assert not [e for e in checkpoint_events(plan) if e["name"] == "failed"]
    assert len(saves) >= 2  # on a busy machine a save may take most of the run
    for (began, ended), (following, _) in pairwise(saves):
        assert following - began >= 30 or following == 240  # the last is taken when the run ends
        assert following <= max(began + 30, ended) + SOON

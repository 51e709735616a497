"""Training processes are killed and resumed: the quick form of `surefoot bench chaos`, with the same code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.chaos import FAULTS
from benchmarks.chaos.fork_server import ForkServer
from benchmarks.chaos.interruptions import kill_runs
from benchmarks.chaos.report import table
from benchmarks.chaos.training_run import RunPlan
from benchmarks.chaos.trials import ChaosBench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosBench]:
    with ForkServer() as server:
        yield ChaosBench(tmp_path_factory.mktemp("chaos"), server)


@pytest.mark.parametrize("name", FAULTS)
def test_run_survives(name: str, bench: ChaosBench) -> None:
    fault = FAULTS[name]
    tally = fault.run(bench, fault.quick_trials)
    assert tally.tried >= max(1, fault.quick_trials)
    assert not tally.lost, "\n".join(tally.lost)
    assert f"| {tally.tried:,} | {tally.tried:,} | 0 |" in table([tally])


def test_saving_does_not_change_a_healthy_run(bench: ChaosBench) -> None:
    plan = RunPlan(run=bench.new_run_path("healthy"), steps=40, save_every=3)
    assert bench.run_to_end(plan) == [0]
    assert bench.compare(plan) == ""


def test_run_that_cannot_resume_is_reported_as_lost(bench: ChaosBench) -> None:
    """Negative control: without checkpoints, a kill loses the run."""
    plan = RunPlan(run=bench.new_run_path("bare"), steps=60, mode="bare", signal_after=(20, 9))
    assert bench.run_to_end(plan) == [-9]
    assert "loss of step 20" in bench.compare(plan)
    assert kill_runs(bench, 0).tried == 0

"""Real runs, really killed: the short form of `surefoot bench chaos`, with the same code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.chaos import FAULTS
from benchmarks.chaos.fork_server import Nursery
from benchmarks.chaos.interruptions import kills
from benchmarks.chaos.report import table
from benchmarks.chaos.training_run import Plan
from benchmarks.chaos.trials import Bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Nursery() as nursery:
        yield Bench(tmp_path_factory.mktemp("chaos"), nursery)


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_survives(name: str, bench: Bench) -> None:
    fault = FAULTS[name]
    tally = fault.try_it(bench, fault.quick)
    assert tally.tried >= max(1, fault.quick)
    assert not tally.lost, "\n".join(tally.lost)
    assert f"| {tally.tried:,} | {tally.tried:,} | 0 |" in table([tally])


def test_a_healthy_run_that_is_saved_is_the_same_as_one_that_is_not(bench: Bench) -> None:
    plan = Plan(run=bench.new("healthy"), steps=40, every=3)
    assert bench.live(plan) == [0]
    assert bench.compare(plan) == ""


def test_a_run_that_does_not_go_on_is_told_as_lost(bench: Bench) -> None:
    """The control: where nothing is saved, a kill is not survived."""
    plan = Plan(run=bench.new("bare"), steps=60, way="bare", stop=(20, 9))
    assert bench.live(plan) == [-9]
    assert "loss of step 20" in bench.compare(plan)
    assert kills(bench, 0).tried == 0

"""How often snapshots are taken: by what one costs, as the policy says, and alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

import surefoot
from surefoot.checkpoint.copies import StateCopy
from surefoot.checkpoint.snapshots import Snapshot
from surefoot.guard.snapshot_interval import FIRST_INTERVAL, LADDER, SnapshotInterval, shortest_interval
from surefoot.records import StepMetrics

STEP = 0.1


class PlantedClock:
    """A clock that moves by a planted cost between the beginning and the end of a snapshot, and may say so late."""

    def __init__(self, *, late: int = 0) -> None:
        self.time, self.late = 0.0, late

    def now(self) -> float:
        return self.time

    def seconds(self, start: float, end: float) -> float | None:
        self.late -= 1
        return None if self.late >= 0 else end - start


class PlantedRun:
    """Attempts of `STEP` seconds, with snapshots as an interval says, each at a planted cost."""

    def __init__(self, *, ring_size: int = 8, clock: PlantedClock | None = None, **policy: Any) -> None:
        self.clock = clock or PlantedClock()
        self.interval = SnapshotInterval(surefoot.Policy(**policy), self.clock)
        self.ring_size, self.attempt, self.last = ring_size, 0, -1
        self.taken: list[int] = []

    def train(self, attempts: int, cost: float, *, wait: float = 0.0, allocated: bool = False) -> None:
        for _ in range(attempts):
            self.interval.row_read(
                StepMetrics(step=self.attempt, attempt=self.attempt, time=0.0, seconds=STEP), self.ring_size
            )
            self.interval.agree(self.interval.proposed)
            if self.attempt - self.last >= self.interval.updates:
                start = self.interval.now()
                self.clock.time += cost
                self.interval.snapshot_taken(Snapshot(self.attempt, 0, StateCopy(), allocated=allocated), start)
                waits = self.interval.now()
                self.clock.time += wait
                self.interval.waited(waits)
                self.taken.append(self.attempt)
                self.last = self.attempt
            self.attempt += 1


@pytest.mark.parametrize(("cost", "updates"), [(1e-5, 5), (1.5e-3, 8), (3.9e-3, 20), (7.5e-3, 40), (1.0, 50)])
def test_interval_follows_the_cost(cost: float, updates: int) -> None:
    run = PlantedRun()
    run.train(40, cost)
    assert run.taken[:2] == [FIRST_INTERVAL - 1, 2 * FIRST_INTERVAL - 1], "the first ones are there to be measured"
    run.train(600, cost)
    assert run.interval.updates == updates
    assert run.interval.time_share <= 0.002 or updates == LADDER[-1]
    assert f"a snapshot every {updates} updates: one takes" in run.interval.describe()


def test_waiting_for_a_transfer_is_part_of_the_cost() -> None:
    run = PlantedRun()
    run.train(300, 1e-3, wait=2.9e-3)
    assert run.interval.updates == 20


def test_interval_follows_a_cost_that_changes_but_not_its_noise() -> None:
    run = PlantedRun()
    run.train(300, 1.9e-3)
    assert run.interval.updates == 10
    for k in range(20):
        run.train(20, (1.55e-3, 1.95e-3)[k % 2])
        assert run.interval.updates == 10
    run.train(400, 7.9e-3)
    assert run.interval.updates == 40
    run.train(600, 7e-4)
    assert run.interval.updates == 5


def test_first_use_of_memory_counts_only_until_it_is_reused() -> None:
    run = PlantedRun()
    run.train(75, 7.9e-3, allocated=True)
    assert run.interval.updates == FIRST_INTERVAL, "it is touched for the first time only once"
    run.train(400, 9e-4)
    assert run.interval.updates == 5


def test_memory_that_is_never_reused_counts() -> None:
    run = PlantedRun()
    run.train(300, 7.9e-3, allocated=True)
    assert run.interval.updates == 40


def test_cost_that_is_known_late_is_waited_for_without_blocking() -> None:
    run = PlantedRun(clock=PlantedClock(late=25))
    run.train(25, 9e-4)
    assert run.interval.updates == FIRST_INTERVAL
    assert "until it is known what one costs" in run.interval.describe()
    run.train(60, 9e-4)
    assert run.interval.updates == 5


def test_share_of_the_time_can_be_set() -> None:
    run = PlantedRun(snapshot_time_share=0.01)
    run.train(200, 9.9e-3)
    assert run.interval.updates == 10


def test_number_of_the_user_is_obeyed() -> None:
    run = PlantedRun(snapshot_every=37)
    run.train(300, 1e-6)
    assert run.taken == [*range(36, 300, 37)]
    assert not run.interval.measures
    assert run.interval.describe() == "a snapshot every 37 updates (Policy.snapshot_every)"


@pytest.mark.parametrize(("size", "least"), [(2, 50), (3, 15), (4, 15), (6, 8), (8, 5)])
def test_few_snapshots_are_taken_further_apart(size: int, least: int) -> None:
    """Else none of them would be older than what is not proven to be good yet."""
    run = PlantedRun(ring_size=size)
    run.train(400, 1e-6)
    assert run.interval.updates == least
    assert shortest_interval(size, 12) <= least


def test_ranks_take_the_longest_proposal() -> None:
    fast, slow = PlantedRun(), PlantedRun()
    fast.train(30, 1e-5)
    slow.train(30, 5e-3)
    assert fast.interval.proposed < slow.interval.proposed
    agreed = max(fast.interval.proposed, slow.interval.proposed)
    assert [run.interval.agree(agreed) for run in (fast, slow)] == [True, False]
    assert fast.interval.updates == slow.interval.updates == 25


def test_share_of_the_time_is_validated() -> None:
    with pytest.raises(ValueError, match="snapshot_time_share must be above 0"):
        surefoot.Policy(snapshot_time_share=0.0)

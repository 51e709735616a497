"""The snapshot ring: which snapshots stay, which are good, what happens when memory is short, and two ranks."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from rewind_runs import Run, same, whole

from surefoot.checkpoint import copies, snapshot_memory, snapshots
from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing

SCRIPT = Path(__file__).parent / "two_rank_snapshots.py"


def ring_of(run: Run, **options: Any) -> SnapshotRing:
    return SnapshotRing(whole(run), **options)


def started(**options: Any) -> tuple[Run, SnapshotRing]:
    run = Run(way="fused")
    run.train(0)
    return run, ring_of(run, **options)


def attempts(ring: SnapshotRing, *, good: bool | None = None) -> list[int]:
    return [s.attempt for s in ring.snapshots if good is None or s.good == good]


def taken(ring: SnapshotRing, attempt: int) -> Snapshot:
    state = ring.take(attempt, attempt)
    assert state is not None
    return state


# -- which states are kept


def test_a_state_is_good_once_the_steps_after_it_were_healthy() -> None:
    _, ring = started()
    assert ring.describe() == "no snapshots yet"
    assert ring.newest_good() is None
    for attempt in (10, 20, 30):
        assert not taken(ring, attempt).good
    assert ring.newest_good() is None
    ring.mark_good(20)
    assert attempts(ring, good=True) == [10, 20]
    newest = ring.newest_good()
    assert newest is not None
    assert (newest.attempt, newest.step) == (20, 20)
    earlier = ring.newest_good(before=20)
    assert earlier is not None
    assert earlier.attempt == 10
    assert ring.newest_good(before=10) is None
    assert "attempt 20 (good), attempt 30 (unproven)" in ring.describe()
    assert "on the model's device" in ring.describe()


def test_the_oldest_make_room_for_new_ones() -> None:
    _, ring = started()
    for attempt in range(10, 70, 10):
        taken(ring, attempt)
        ring.mark_good(attempt)
    assert attempts(ring) == [40, 50, 60]


def test_an_old_good_state_stays_as_long_as_it_is_in_reach() -> None:
    _, ring = started(size=4, max_age=100)
    ages = []
    for attempt in range(0, 400, 10):
        taken(ring, attempt)
        ring.mark_good(attempt - 10)
        newest = ring.newest_good()
        assert newest is None or newest.attempt == attempt - 10
        ages.append(attempt - attempts(ring)[0])
    assert max(ages) == 110, "told when the next one is taken"
    assert ages[20:].count(110) >= 2, "another takes the place of one that has become too old"
    assert min(ages[5:]) >= 20


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_last_good_state_is_never_given_up_for_an_unproven_one(size: int) -> None:
    _, ring = started(size=size)
    taken(ring, 10)
    ring.mark_good(10)
    for attempt in range(20, 120, 10):
        ring.take(attempt, attempt)
    assert attempts(ring, good=True) == [10]
    assert len(attempts(ring)) <= size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_states_are_proven_even_where_proof_comes_late(size: int) -> None:
    """A state every 10 steps and proof after 50: given up for younger ones, none would ever live to be proven."""
    _, ring = started(size=size)
    for attempt in range(0, 500, 10):
        ring.take(attempt, attempt)
        ring.mark_good(attempt - 50)
    newest = ring.newest_good()
    assert newest is not None
    assert newest.attempt >= 380


def test_doubt_forgets_what_may_hold_the_trouble_and_nothing_else() -> None:
    _, ring = started(size=4)
    for attempt in (10, 20, 30, 40):
        taken(ring, attempt)
    ring.mark_good(20)
    ring.drop_unproven_after(30)
    assert attempts(ring) == [10, 20, 30]
    ring.drop_unproven_after(5)
    assert attempts(ring) == [10, 20], "what is proven stays"


def test_a_ring_of_one_is_turned_away() -> None:
    run = Run()
    with pytest.raises(ValueError, match=r"needs size >= 2.*size=1"):
        ring_of(run, size=1)


# -- going back


def test_a_poisoned_run_goes_back_and_trains_on_as_if_nothing_had_been() -> None:
    straight = Run(way="fused")
    for i in range(8):
        straight.train(i)
    run, ring = started()
    for i in range(1, 6):
        run.train(i)
        ring.take(i, i)
        ring.mark_good(i - 2)
    run.train(20, math.nan)
    ring.take(20, 6)
    ring.drop_unproven_after(3)
    state = ring.newest_good()
    assert state is not None
    ring.rewind(state)
    for i in range(state.step + 1, 8):
        run.train(i)
    assert same(straight.contents(), run.contents())


def test_going_far_back_forgets_the_states_after() -> None:
    run, ring = started()
    for attempt in (10, 20, 30):
        taken(ring, attempt)
    ring.mark_good(30)
    far = ring.newest_good(before=20)
    assert far is not None
    ring.rewind(far)
    assert attempts(ring) == [10]
    run.train(1)
    later = taken(ring, 40)
    ring.rewind(far)
    with pytest.raises(ValueError, match="attempt 40 is not in the ring"):
        ring.rewind(later)


def test_in_the_long_run_nothing_new_is_allocated() -> None:
    run, ring = started()
    seen: set[int] = set()
    for attempt in range(30):
        run.train(attempt)
        seen |= {t.data_ptr() for t in taken(ring, attempt).copy.tensors}
        ring.mark_good(attempt - 1)
        if attempt % 7 == 6:
            state = ring.newest_good()
            assert state is not None
            ring.drop_unproven_after(state.attempt)
            ring.rewind(state)
        if attempt == 3:
            assert ring.nbytes == 3 * taken(ring, attempt).copy.nbytes
            known = set(seen)
    assert seen == known


# -- a run that grows


def test_states_give_way_to_a_run_that_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    run, ring = started()
    for attempt in (10, 20, 30):
        run.train(attempt)
        taken(ring, attempt)
    ring.mark_good(20)
    held = ring.nbytes
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: held // 2)
    run.train(40)
    taken(ring, 40)
    assert attempts(ring) == [20, 30, 40], "there is room enough"
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: held // 2 - 1)
    monkeypatch.setattr(
        snapshots, "plan_snapshots", lambda nbytes, budget, count, base: snapshot_memory.SnapshotPlan("host", count, "")
    )
    run.train(50)
    taken(ring, 50)
    assert attempts(ring) == [20, 50], "the best one stays"
    assert [state.copy.location for state in ring.snapshots] == ["device", "host"]
    assert "in host memory" in ring.describe()
    ring.mark_good(50)
    taken(ring, 60)
    assert ring.take(70, 70, wait=False) is None, "what lay on the device is no memory for it"
    run.train(80)
    taken(ring, 80)
    assert {state.copy.location for state in ring.snapshots} == {"host"}


def test_a_run_that_takes_all_memory_has_no_states_and_knows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ring = started()
    taken(ring, 10)
    for room in (snapshots, snapshot_memory):
        monkeypatch.setattr(room, "free_bytes", lambda device: 1)
    assert ring.take(20, 20) is None
    assert "do not fit in half of the free memory" in ring.describe()
    assert ring.nbytes == 0


# -- memory that takes long to get


@pytest.fixture
def slow_memory(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """States live on the host, and their memory comes when the test says so."""
    come = threading.Event()
    real = copies.StateCopy.allocate_for

    def allocate_for(self: copies.StateCopy, look: copies.LiveState) -> copies.StateCopy:
        if self.layouts != look.layouts and threading.current_thread() is not threading.main_thread():
            assert come.wait(10)
        return real(self, look)

    monkeypatch.setattr(copies.StateCopy, "allocate_for", allocate_for)
    monkeypatch.setattr(
        snapshots, "plan_snapshots", lambda nbytes, budget, count, base: snapshot_memory.SnapshotPlan("host", count, "")
    )
    return come


def ready(ring: SnapshotRing) -> None:
    """Wait until the memory of the next state is there."""
    assert ring._allocating is not None
    ring._allocating.run()


def test_a_run_does_not_wait_for_the_memory_of_its_states(slow_memory: threading.Event) -> None:
    run, ring = started()
    taken(ring, 0)  # who asks to wait is served at once
    ring.mark_good(0)
    ring.preallocate()
    for attempt in (10, 20):
        run.train(attempt)
        assert ring.take(attempt, attempt, wait=False) is None, "its memory is still being made"
    assert attempts(ring) == [0]
    slow_memory.set()
    for attempt in (30, 40):
        ready(ring)
        run.train(attempt)
        assert ring.take(attempt, attempt, wait=False) is not None
        ring.mark_good(attempt)
    assert attempts(ring) == [0, 30, 40]
    held = ring.nbytes
    assert ring.take(50, 50, wait=False) is not None, "the memory of the first one serves"
    assert (attempts(ring), ring.nbytes) == ([30, 40, 50], held)
    before = run.contents()
    run.train(60, math.nan)
    ring.rewind(ring.snapshots[-1])
    assert same(before, run.contents())


def test_a_run_that_has_grown_since_does_not_use_what_was_made_for_it(slow_memory: threading.Event) -> None:
    run = Run(way="fused")
    ring = ring_of(run)
    ring.preallocate()
    run.train(0)  # now there is optimizer state
    slow_memory.set()
    assert ring.take(1, 1, wait=False) is None
    ready(ring)
    state = ring.take(2, 2, wait=False)
    assert state is not None
    assert state.copy.layouts == whole(run).collect().layouts


def test_memory_that_never_comes_is_told_when_the_next_state_is_due(
    slow_memory: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ring = started()
    taken(ring, 0)
    allocations_fail(monkeypatch, MemoryError(), after=0)
    assert ring.take(1, 1, wait=False) is None
    assert ring.disabled_reason is None
    slow_memory.set()
    ready(ring)
    assert ring.take(2, 2, wait=False) is None
    assert ring.disabled_reason is not None
    assert ring.disabled_reason.startswith("out of memory while taking a snapshot")


# -- short of memory


def allocations_fail(monkeypatch: pytest.MonkeyPatch, error: Exception, *, after: int) -> None:
    """From then on there is no new memory for copies."""
    real, calls = torch.empty_like, [0]

    def empty_like(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", empty_like)


SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: you tried to allocate 8"),
    RuntimeError("CUDA error: out of memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=repr)
def test_when_memory_runs_out_there_are_fewer_states(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ring = started(size=4)
    many = len(taken(ring, 0).copy.tensors)
    allocations_fail(monkeypatch, error, after=many + 1)  # room for one more
    for attempt in range(1, 6):
        run.train(attempt)
        taken(ring, attempt)
        ring.mark_good(attempt)
    assert ring.disabled_reason is None
    assert attempts(ring) == [4, 5]
    assert "2 of 2 snapshots" in ring.describe()


@pytest.mark.parametrize("error", SHORTAGES, ids=repr)
def test_with_no_memory_for_two_states_the_ring_goes_off(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ring = started()
    taken(ring, 0)
    ring.mark_good(0)
    allocations_fail(monkeypatch, error, after=0)
    assert ring.take(1, 1) is None
    assert ring.disabled_reason is not None
    assert ring.disabled_reason.startswith("out of memory while taking a snapshot")
    assert "\n" not in ring.disabled_reason
    assert ring.describe() == f"no snapshots are taken: {ring.disabled_reason}"
    assert ring.newest_good() is None
    assert ring.nbytes == 0
    assert ring.take(2, 2) is None
    ring.before_update()


def test_other_errors_are_not_taken_for_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ring = started()
    allocations_fail(monkeypatch, RuntimeError("CUDA error: an illegal memory access was encountered"), after=0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ring.take(0, 0)


def test_shrinking_on_request_frees_a_state_at_once() -> None:
    _, ring = started()
    for attempt in (10, 20, 30):
        taken(ring, attempt)
        ring.mark_good(attempt)
    one = ring.nbytes // 3
    ring.shrink("training ran out of memory")
    assert attempts(ring) == [20, 30]
    assert ring.nbytes == 2 * one
    ring.shrink("training ran out of memory")
    assert ring.disabled_reason == "training ran out of memory"
    assert ring.nbytes == 0


def test_a_budget_is_kept_as_the_run_grows() -> None:
    run = Run(way="fused")
    weights = whole(run).capture().nbytes
    ring = ring_of(run, size=4, budget_bytes=7 * weights)
    taken(ring, 0)
    taken(ring, 1)
    run.train(0)  # now there is optimizer state
    later = taken(ring, 2)
    assert later.copy.nbytes > 2 * weights
    for attempt in range(3, 9):
        ring.mark_good(attempt)
        ring.take(attempt, attempt)
        assert ring.nbytes <= 7 * weights
    assert len(attempts(ring)) == 2


def test_a_budget_too_small_is_told_at_the_first_state() -> None:
    _, ring = started(budget_bytes=100)
    assert ring.take(0, 0) is None
    assert ring.disabled_reason is not None
    assert "do not fit in the budget of 100 bytes" in ring.disabled_reason


# -- two processes


@pytest.fixture(scope="module")
def told(two_processes: Callable[[Path], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each of the two processes saw."""
    return two_processes(SCRIPT)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "ddp compiled", "fsdp2", "fsdp2 fused", "zero"])
def test_two_processes_go_back_to_the_same_state(kind: str, rank: int, told: list[dict[str, Any]]) -> None:
    seen = told[rank][kind]
    assert seen["attempt"] == 2
    assert seen["spoilt"], "trouble on one rank has reached the weights of both"
    assert seen["back"], "put back to the bit"
    assert seen["in place"]
    assert seen["made anew"], "also when the optimizer has lost its state"
    assert seen["on"], "and trains on as if it had never left"


def test_every_placement_of_a_dtensor_goes_back(told: list[dict[str, Any]]) -> None:
    assert all(seen["placements"] for seen in told)

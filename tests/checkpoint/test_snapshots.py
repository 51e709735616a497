"""The snapshot ring: which snapshots are kept, which are good, shortage of memory, and two ranks."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from rewind_runs import Run, same, train_state_of

from surefoot.checkpoint import copies, snapshot_memory, snapshots
from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing

SCRIPT = Path(__file__).parent / "two_rank_snapshots.py"


def ring_of(run: Run, **options: Any) -> SnapshotRing:
    return SnapshotRing(train_state_of(run), **options)


def started(**options: Any) -> tuple[Run, SnapshotRing]:
    run = Run(implementation="fused")
    run.train(0)
    return run, ring_of(run, **options)


def attempts(ring: SnapshotRing, *, good: bool | None = None) -> list[int]:
    return [s.attempt for s in ring.snapshots if good is None or s.good == good]


def take(ring: SnapshotRing, attempt: int) -> Snapshot:
    snapshot = ring.take(attempt, attempt)
    assert snapshot is not None
    return snapshot


# -- which snapshots are kept


def test_snapshot_is_good_once_later_steps_were_healthy() -> None:
    _, ring = started()
    assert ring.describe() == "no snapshots yet"
    assert ring.newest_good() is None
    for attempt in (10, 20, 30):
        assert not take(ring, attempt).good
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


def test_oldest_snapshots_are_replaced() -> None:
    _, ring = started()
    for attempt in range(10, 70, 10):
        take(ring, attempt)
        ring.mark_good(attempt)
    assert attempts(ring) == [40, 50, 60]


@pytest.mark.parametrize("every", [5, 10, 20])
def test_snapshots_are_thinned_with_age(every: int) -> None:
    """The newest are as dense as they are taken, older ones geometrically sparser, up to about `max_age`."""
    _, ring = started(size=8, max_age=150)
    take(ring, -1)
    ring.mark_good(-1)
    for attempt in range(every - 1, 900, every):
        take(ring, attempt)
        ring.mark_good(attempt - 12)
        ages = [attempt - a for a in reversed(attempts(ring))]
        newest = ring.newest_good()
        assert newest is not None
        assert attempt - newest.attempt < 12 + every, "the newest good snapshot is never dropped"
        assert (attempts(ring)[0] == -1) == (attempt <= 300), "the initial state stays for twice `max_age`"
        assert len(ages) == 8 or attempt < 8 * every
        assert ages[-1] >= min(140, attempt + 1)
        assert ages[-1] <= 300 + every
        between = [age for age in ages if 2 * every <= age <= 150]
        assert all(older <= 5 * age for age, older in itertools.pairwise(between)), "no large gaps"
        assert ages[:2] == [0, every][: len(ages)] or attempt < every


def test_initial_state_is_kept_for_restarts_with_little_room() -> None:
    _, ring = started(size=4, max_age=150)
    for attempt in (-1, *range(7, 300, 8)):
        take(ring, attempt)
        ring.mark_good(attempt - 12 if attempt >= 0 else -1)
        assert attempts(ring)[0] == -1
        assert len(attempts(ring)) <= 4


@pytest.mark.parametrize("size", [2, 3, 5])
def test_last_good_snapshot_is_never_replaced_by_an_unproven_one(size: int) -> None:
    _, ring = started(size=size)
    take(ring, 10)
    ring.mark_good(10)
    for attempt in range(20, 120, 10):
        ring.take(attempt, attempt)
    assert attempts(ring, good=True) == [10]
    assert len(attempts(ring)) <= size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_snapshots_are_confirmed_even_with_a_long_delay(size: int) -> None:
    """A snapshot every 10 steps, confirmed after 50: if newer ones replaced it, none would ever be confirmed."""
    _, ring = started(size=size)
    for attempt in range(0, 500, 10):
        ring.take(attempt, attempt)
        ring.mark_good(attempt - 50)
    newest = ring.newest_good()
    assert newest is not None
    assert newest.attempt >= 380


def test_drop_unproven_after_keeps_earlier_and_confirmed_snapshots() -> None:
    _, ring = started(size=4)
    for attempt in (10, 20, 30, 40):
        take(ring, attempt)
    ring.mark_good(20)
    ring.drop_unproven_after(30)
    assert attempts(ring) == [10, 20, 30]
    ring.drop_unproven_after(5)
    assert attempts(ring) == [10, 20], "confirmed snapshots are kept"


def test_ring_of_size_one_is_refused() -> None:
    run = Run()
    with pytest.raises(ValueError, match=r"needs size >= 2.*size=1"):
        ring_of(run, size=1)


# -- rewinding


def test_run_with_nan_weights_is_rewound_exactly() -> None:
    undisturbed = Run(implementation="fused")
    for i in range(8):
        undisturbed.train(i)
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
    assert same(undisturbed.contents(), run.contents())


def test_rewind_drops_later_snapshots() -> None:
    run, ring = started()
    for attempt in (10, 20, 30):
        take(ring, attempt)
    ring.mark_good(30)
    earlier = ring.newest_good(before=20)
    assert earlier is not None
    ring.rewind(earlier)
    assert attempts(ring) == [10]
    run.train(1)
    later = take(ring, 40)
    ring.rewind(earlier)
    with pytest.raises(ValueError, match="attempt 40 is not in the ring"):
        ring.rewind(later)


def test_snapshots_reuse_memory() -> None:
    run, ring = started()
    addresses: set[int] = set()
    for attempt in range(30):
        run.train(attempt)
        addresses |= {t.data_ptr() for t in take(ring, attempt).copy.tensors}
        ring.mark_good(attempt - 1)
        if attempt % 7 == 6:
            state = ring.newest_good()
            assert state is not None
            ring.drop_unproven_after(state.attempt)
            ring.rewind(state)
        if attempt == 3:
            assert ring.nbytes == 3 * take(ring, attempt).copy.nbytes
            first_addresses = set(addresses)
    assert addresses == first_addresses


# -- a run whose memory grows


def test_snapshots_are_dropped_when_the_run_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run, ring = started()
    for attempt in (10, 20, 30):
        run.train(attempt)
        take(ring, attempt)
    ring.mark_good(20)
    nbytes_before = ring.nbytes
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: nbytes_before // 2)
    run.train(40)
    take(ring, 40)
    assert attempts(ring) == [20, 30, 40], "there is enough memory"
    monkeypatch.setattr(snapshots, "free_bytes", lambda device: nbytes_before // 2 - 1)
    monkeypatch.setattr(
        snapshots, "plan_snapshots", lambda nbytes, budget, count, base: snapshot_memory.SnapshotPlan("host", count, "")
    )
    run.train(50)
    take(ring, 50)
    assert attempts(ring) == [20, 50], "the newest good one is kept"
    assert [state.copy.location for state in ring.snapshots] == ["device", "host"]
    assert "in host memory" in ring.describe()
    ring.mark_good(50)
    take(ring, 60)
    assert ring.take(70, 70, wait=False) is None, "device memory cannot be reused for a host snapshot"
    run.train(80)
    take(ring, 80)
    assert {state.copy.location for state in ring.snapshots} == {"host"}


def test_no_free_memory_disables_snapshots_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ring = started()
    take(ring, 10)
    for module in (snapshots, snapshot_memory):
        monkeypatch.setattr(module, "free_bytes", lambda device: 1)
    assert ring.take(20, 20) is None
    assert "do not fit in half of the free memory" in ring.describe()
    assert ring.nbytes == 0


# -- slow allocation


@pytest.fixture
def slow_memory(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Snapshots are in host memory, which is allocated only once the event is set."""
    memory_ready = threading.Event()
    real = copies.StateCopy.allocate_for

    def allocate_for(self: copies.StateCopy, look: copies.LiveState) -> copies.StateCopy:
        if self.layouts != look.layouts and threading.current_thread() is not threading.main_thread():
            assert memory_ready.wait(10)
        return real(self, look)

    monkeypatch.setattr(copies.StateCopy, "allocate_for", allocate_for)
    monkeypatch.setattr(
        snapshots, "plan_snapshots", lambda nbytes, budget, count, base: snapshot_memory.SnapshotPlan("host", count, "")
    )
    return memory_ready


def ready(ring: SnapshotRing) -> None:
    """Wait until the memory of the next snapshot is allocated."""
    assert ring._allocating is not None
    ring._allocating.run()


def test_training_does_not_wait_for_snapshot_memory(slow_memory: threading.Event) -> None:
    run, ring = started()
    take(ring, 0)  # wait=True takes it at once
    ring.mark_good(0)
    ring.preallocate()
    for attempt in (10, 20):
        run.train(attempt)
        assert ring.take(attempt, attempt, wait=False) is None, "its memory is still being allocated"
    assert attempts(ring) == [0]
    slow_memory.set()
    for attempt in (30, 40):
        ready(ring)
        run.train(attempt)
        assert ring.take(attempt, attempt, wait=False) is not None
        ring.mark_good(attempt)
    assert attempts(ring) == [0, 30, 40]
    nbytes_before = ring.nbytes
    assert ring.take(50, 50, wait=False) is not None, "the memory of the first one is reused"
    assert (attempts(ring), ring.nbytes) == ([30, 40, 50], nbytes_before)
    before = run.contents()
    run.train(60, math.nan)
    ring.rewind(ring.snapshots[-1])
    assert same(before, run.contents())


def test_preallocated_memory_of_the_wrong_size_is_not_used(slow_memory: threading.Event) -> None:
    run = Run(implementation="fused")
    ring = ring_of(run)
    ring.preallocate()
    run.train(0)  # now there is optimizer state
    slow_memory.set()
    assert ring.take(1, 1, wait=False) is None
    ready(ring)
    state = ring.take(2, 2, wait=False)
    assert state is not None
    assert state.copy.layouts == train_state_of(run).collect().layouts


def test_failed_background_allocation_is_reported_at_the_next_snapshot(
    slow_memory: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ring = started()
    take(ring, 0)
    allocations_fail(monkeypatch, MemoryError(), after=0)
    assert ring.take(1, 1, wait=False) is None
    assert ring.disabled_reason is None
    slow_memory.set()
    ready(ring)
    assert ring.take(2, 2, wait=False) is None
    assert ring.disabled_reason is not None
    assert ring.disabled_reason.startswith("out of memory while taking a snapshot")


# -- shortage of memory


def allocations_fail(monkeypatch: pytest.MonkeyPatch, error: Exception, *, after: int) -> None:
    """Make allocations for copies fail after `after` calls."""
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
def test_out_of_memory_reduces_the_number_of_snapshots(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ring = started(size=4)
    tensors_per_snapshot = len(take(ring, 0).copy.tensors)
    allocations_fail(monkeypatch, error, after=tensors_per_snapshot + 1)  # room for one more
    for attempt in range(1, 6):
        run.train(attempt)
        take(ring, attempt)
        ring.mark_good(attempt)
    assert ring.disabled_reason is None
    assert attempts(ring) == [4, 5]
    assert "2 of 2 snapshots" in ring.describe()


@pytest.mark.parametrize("error", SHORTAGES, ids=repr)
def test_no_memory_for_two_snapshots_disables_the_ring(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ring = started()
    take(ring, 0)
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


def test_other_errors_are_not_handled_as_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ring = started()
    allocations_fail(monkeypatch, RuntimeError("CUDA error: an illegal memory access was encountered"), after=0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ring.take(0, 0)


def test_shrink_frees_a_snapshot_at_once() -> None:
    _, ring = started()
    for attempt in (10, 20, 30):
        take(ring, attempt)
        ring.mark_good(attempt)
    nbytes_each = ring.nbytes // 3
    ring.shrink("training ran out of memory")
    assert attempts(ring) == [20, 30]
    assert ring.nbytes == 2 * nbytes_each
    ring.shrink("training ran out of memory")
    assert ring.disabled_reason == "training ran out of memory"
    assert ring.nbytes == 0


def test_budget_holds_as_the_run_grows() -> None:
    run = Run(implementation="fused")
    weights = train_state_of(run).capture().nbytes
    ring = ring_of(run, size=4, budget_bytes=7 * weights)
    take(ring, 0)
    take(ring, 1)
    run.train(0)  # now there is optimizer state
    later = take(ring, 2)
    assert later.copy.nbytes > 2 * weights
    for attempt in range(3, 9):
        ring.mark_good(attempt)
        ring.take(attempt, attempt)
        assert ring.nbytes <= 7 * weights
    assert len(attempts(ring)) == 2


def test_budget_that_is_too_small_is_reported_at_the_first_snapshot() -> None:
    _, ring = started(budget_bytes=100)
    assert ring.take(0, 0) is None
    assert ring.disabled_reason is not None
    assert "do not fit in the budget of 100 bytes" in ring.disabled_reason


# -- two ranks


@pytest.fixture(scope="module")
def results(two_processes: Callable[[Path], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of both ranks."""
    return two_processes(SCRIPT)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "ddp compiled", "fsdp2", "fsdp2 fused", "zero"])
def test_two_ranks_rewind_to_the_same_snapshot(kind: str, rank: int, results: list[dict[str, Any]]) -> None:
    result = results[rank][kind]
    assert result["attempt"] == 2
    assert result["nonfinite"], "a NaN on one rank has reached the weights of both"
    assert result["restored"], "restored bit for bit"
    assert result["in place"]
    assert result["recreated"], "also when the optimizer has no state"
    assert result["continues"], "training continues as if nothing had happened"


def test_dtensors_of_every_placement_are_rewound(results: list[dict[str, Any]]) -> None:
    assert all(result["placements"] for result in results)

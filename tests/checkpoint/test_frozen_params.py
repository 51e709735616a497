"""All snapshots share one copy of the frozen parameters, and every change to these is detected."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from frozen_models import AdapterModel, adapter_run, equal, follow, state_of, teacher_student_run, train

from surefoot.checkpoint import copies, snapshot_memory, snapshots
from surefoot.checkpoint.checksums import Checksummer, leaves, portable_checksum
from surefoot.checkpoint.snapshots import SnapshotRing
from surefoot.checkpoint.train_state import TrainState


def storages(ring: SnapshotRing) -> int:
    """Bytes of the distinct storages of all snapshots in a ring."""
    all_storages = [t.untyped_storage() for state in ring.snapshots for t in state.copy.tensors]
    return sum({s.data_ptr(): s.nbytes() for s in all_storages}.values())


def nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


def filled(model: nn.Module, optimizer: torch.optim.Optimizer, *, size: int = 4, **options: Any) -> SnapshotRing:
    """A ring with `size` snapshots, one after each update."""
    ring = SnapshotRing(TrainState(model, optimizer), size=size, **options)
    for attempt in range(size):
        train(model, optimizer, attempt)
        ring.before_update()
        assert ring.take(attempt, attempt) is not None
    ring.mark_good(size)
    return ring


# -- memory


def test_four_snapshots_share_one_copy_of_frozen_params() -> None:
    model, optimizer = adapter_run()
    ring = filled(model, optimizer)
    frozen = nbytes(model.base.parameters())
    trained = nbytes([model.down.weight, model.up.weight])
    buffers = nbytes(model.buffers())
    moments = sum(nbytes(v for v in s.values()) for s in optimizer.state.values())
    assert frozen > 50 * trained
    assert storages(ring) == ring.nbytes == frozen + 4 * (trained + buffers + moments)
    assert "of shared frozen parameters" in ring.describe()


def test_budget_counts_frozen_params_once() -> None:
    model, optimizer = adapter_run()
    frozen = nbytes(model.base.parameters())
    train(model, optimizer, 0)
    trained_nbytes = sum(TrainState(model, optimizer).collect().nbytes.values()) - frozen
    ring = filled(model, optimizer, budget_bytes=frozen + 4 * trained_nbytes)
    assert (ring.disabled_reason, len(ring.snapshots)) == (None, 4)
    ring = filled(model, optimizer, size=3, budget_bytes=frozen + 3 * trained_nbytes)
    assert len(ring.snapshots) == 3
    ring = SnapshotRing(TrainState(model, optimizer), size=4, budget_bytes=frozen + 2 * trained_nbytes - 1)
    assert ring.take(0, 0) is None
    assert ring.disabled_reason is not None
    assert "of frozen parameters do not fit in the budget" in ring.disabled_reason


def test_base_is_freed_when_no_snapshot_refers_to_it() -> None:
    model, optimizer = adapter_run()
    ring = filled(model, optimizer, size=3)
    frozen = nbytes(model.base.parameters())
    model.base.requires_grad_(True)
    before = ring.nbytes
    ring.take(10, 10)
    assert ring.base_nbytes == frozen, "older snapshots refer to it"
    for attempt in (11, 12, 13):
        ring.mark_good(attempt)
        assert ring.take(attempt, attempt) is not None
    assert ring.base_nbytes == 0
    assert ring.nbytes > before


def test_host_memory_of_the_base_is_allocated_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        snapshots, "plan_snapshots", lambda nbytes, budget, count, base: snapshot_memory.SnapshotPlan("host", count, "")
    )
    memory_ready, real = threading.Event(), copies.StateCopy.allocate_for

    def allocate_for(self: copies.StateCopy, look: copies.LiveState) -> copies.StateCopy:
        if threading.current_thread() is not threading.main_thread():
            assert memory_ready.wait(10)
        elif not self.fits(look):
            raise AssertionError("the run waits for memory")
        return real(self, look)

    monkeypatch.setattr(copies.StateCopy, "allocate_for", allocate_for)
    model, optimizer = adapter_run()
    train(model, optimizer, 0)
    ring = SnapshotRing(TrainState(model, optimizer), size=3)
    assert ring.take(0, 0, wait=False) is None
    memory_ready.set()
    for attempt in range(1, 5):
        while ring._allocating is not None and not ring._allocating.done:
            time.sleep(0.001)
        train(model, optimizer, attempt)
        assert ring.take(attempt, attempt, wait=False) is not None
        ring.mark_good(attempt)
    assert storages(ring) < 1.5 * nbytes(model.base.parameters())
    expected = state_of(model, optimizer)
    train(model, optimizer, 9, factor=100.0)
    model.base.weight.data.add_(1)
    ring.rewind(ring.snapshots[-1])
    assert equal(expected, state_of(model, optimizer))


def test_out_of_memory_for_the_base_disables_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = adapter_run()
    real = torch.empty_like

    def empty_like(of: Tensor, **options: Any) -> Tensor:
        if of.nbytes > 100_000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(of, **options)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    ring = SnapshotRing(TrainState(model, optimizer), size=4)
    assert ring.take(0, 0) is None
    assert ring.disabled_reason is not None
    assert ring.disabled_reason.startswith("out of memory")
    assert ring.nbytes == 0


# -- rewinding


def test_rewind_does_not_write_unchanged_frozen_params(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = adapter_run()
    ring = filled(model, optimizer)
    expected = state_of(model, optimizer)
    train(model, optimizer, 50, factor=1e3)
    written: list[int] = []
    real = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda a, b: (written.extend(t.data_ptr() for t in a), real(a, b)))
    ring.rewind(ring.snapshots[-1])
    assert equal(expected, state_of(model, optimizer))
    assert model.down.weight.data_ptr() in written
    assert model.base.weight.data_ptr() not in written


@pytest.mark.parametrize("damage", ["one bit", "sign", "swapped rows", "data", "version"])
def test_damaged_frozen_params_are_restored_and_later_snapshots_dropped(damage: str) -> None:
    model, optimizer = adapter_run()
    ring = filled(model, optimizer)
    expected, weight = state_of(model, optimizer), model.base.weight
    if damage == "one bit":
        weight.data.view(torch.int32)[3, 5] ^= 1 << 12
    elif damage == "sign":
        weight.data.neg_()
    elif damage == "swapped rows":
        weight.data[[0, 7]] = weight.data[[7, 0]]
    elif damage == "data":
        weight.data.mul_(1.5)
    else:
        with torch.no_grad():
            weight.mul_(1.5)
    torch.manual_seed(9)
    ring.take(10, 10)
    damaged_state = state_of(model, optimizer)
    ring.verify()
    noticed_by_version = damage == "version"
    assert [s.attempt for s in ring.snapshots] == ([1, 2, 3, 10] if noticed_by_version else [1, 2, 3])
    assert len(ring.messages) == (0 if noticed_by_version else 1)
    if not noticed_by_version:
        assert "base.weight" in ring.messages[0]
        assert "attempt 10 is dropped" in ring.messages[0]
        ring.take(11, 11)
        assert len(ring.messages) == 1
    model.base.weight.data.zero_()
    ring.rewind(ring.snapshots[-1])
    assert equal(damaged_state, state_of(model, optimizer)), "copied in full"
    ring.rewind(ring.snapshots[2])
    assert equal(expected, state_of(model, optimizer)), "from the base"


@pytest.mark.parametrize("start", [0, 12])
@pytest.mark.parametrize("update", ["data", "rebind", "version"])
def test_teacher_is_rewound_with_its_student(update: str, start: int) -> None:
    model, optimizer = teacher_student_run()
    ring = SnapshotRing(TrainState(model, optimizer), size=4)
    ring.take(-1, 0)
    states = {-1: state_of(model, optimizer)}
    for i in range(24):
        ring.before_update()
        train(model, optimizer, i)
        if i >= start:
            follow(model, update)
        if i % 4 == 3:
            ring.take(i, i)
            ring.mark_good(i - 8)
            states[i] = state_of(model, optimizer)
    ring.verify()
    # A tensor at the address of a freed one can be distinguished from it only by its values.
    assert len(ring.messages) in {"data": (1,), "rebind": (0, 1)}.get(update, (0,))
    attempts = [s.attempt for s in ring.snapshots]
    assert attempts[-1] == 23
    assert len(attempts) >= 3
    fixed = {
        id(t) for s in ring.snapshots for t in s.copy.tensors if t.shape == (16, 16) and t.equal(model.fixed.weight)
    }
    assert len(fixed) == 1, "parameters that stay frozen are stored once"
    for state in reversed(ring.snapshots):
        ring.rewind(state)
        assert equal(states[state.attempt], state_of(model, optimizer))


def test_teacher_updated_through_data_from_the_start_costs_no_snapshot() -> None:
    model, optimizer = teacher_student_run()
    ring = SnapshotRing(TrainState(model, optimizer), size=4)
    ring.take(-1, 0)
    for i in range(8):
        ring.before_update()
        train(model, optimizer, i)
        follow(model, "data")
        if i % 4 == 3:
            ring.take(i, i)
    ring.verify()
    assert [s.attempt for s in ring.snapshots] == [-1, 3, 7]


# -- parameters that change


def test_weights_loaded_after_the_first_snapshot_become_a_second_base() -> None:
    model, optimizer = adapter_run()
    ring = filled(model, optimizer, size=4)
    first = state_of(model, optimizer)
    other = AdapterModel().base
    model.base.load_state_dict(other.state_dict())
    second = state_of(model, optimizer)
    for attempt in range(10, 13):
        ring.take(attempt, attempt)
        ring.mark_good(attempt)
    assert ring.base_nbytes == 2 * nbytes(model.base.parameters()), "one belongs to the earlier snapshots"
    ring.rewind(ring.snapshots[-1])
    assert equal(second, state_of(model, optimizer))
    ring.rewind(ring.snapshots[0])
    assert equal(first, state_of(model, optimizer))


def test_unfrozen_params_are_rewound_to_their_frozen_values() -> None:
    model, optimizer = adapter_run()
    ring = filled(model, optimizer, size=3)
    frozen = [p.detach().clone() for p in model.base.parameters()]
    model.base.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.base.parameters())})
    for i in range(5, 8):
        train(model, optimizer, i)
    assert not model.base.weight.equal(frozen[0])
    ring.take(8, 8)
    thawed = state_of(model, optimizer)
    train(model, optimizer, 9)
    ring.rewind(ring.snapshots[-1])
    assert equal(thawed, state_of(model, optimizer))
    ring.rewind(ring.snapshots[0])
    assert all(p.equal(original) for p, original in zip(model.base.parameters(), frozen, strict=True))


def test_tied_frozen_params_stay_tied() -> None:
    model, optimizer = adapter_run()
    twin = nn.Linear(256, 256)
    twin.weight = model.base.weight
    model.add_module("twin", twin.requires_grad_(False))
    view = nn.Parameter(model.base.weight.data, requires_grad=False)  # another parameter with the same storage
    model.register_parameter("view", view)
    ring = filled(model, optimizer, size=2)
    expected = state_of(model, optimizer)
    model.base.weight.data.add_(1)
    ring.rewind(ring.snapshots[-1])
    assert equal(expected, state_of(model, optimizer))
    assert twin.weight is model.base.weight
    assert view.data_ptr() == model.base.weight.data_ptr()


def test_frozen_param_that_shares_storage_with_a_trained_one_is_copied() -> None:
    model, optimizer = adapter_run()
    model.register_parameter("shadow", nn.Parameter(model.up.weight.data, requires_grad=False))
    ring = SnapshotRing(TrainState(model, optimizer), size=4)
    states = {}
    for i in range(6):
        ring.before_update()
        train(model, optimizer, i)
        ring.take(i, i)
        states[i] = state_of(model, optimizer)
    ring.verify()
    assert len(ring.snapshots) >= 2
    for state in reversed(ring.snapshots):
        ring.rewind(state)
        assert equal(states[state.attempt], state_of(model, optimizer))


FORMS = ["bfloat16", "odd", "transposed", "gaps", "complex", "empty", "int8", "meta", "scalar"]


@pytest.mark.parametrize("kind", FORMS)
def test_frozen_params_of_any_dtype_and_layout_are_rewound(kind: str) -> None:
    model, optimizer = adapter_run()
    make: dict[str, Callable[[], Tensor]] = {
        "bfloat16": lambda: torch.randn(5, 7).bfloat16(),
        "odd": lambda: torch.randn(13).half()[1:],
        "transposed": lambda: torch.randn(6, 4).t(),
        "gaps": lambda: torch.randn(6, 8)[:, ::2],
        "complex": lambda: torch.randn(3, 3, dtype=torch.complex64),
        "empty": lambda: torch.empty(0, 4),
        "int8": lambda: torch.randint(-9, 9, (33,), dtype=torch.int8),
        "meta": lambda: torch.empty(3, device="meta"),
        "scalar": lambda: torch.tensor(2.5),
    }
    frozen_param = nn.Parameter(make[kind](), requires_grad=False)
    model.register_parameter("extra", frozen_param)
    ring = filled(model, optimizer, size=3)
    assert len(ring.snapshots) == 3
    if kind != "meta":
        original = frozen_param.detach().clone()
        frozen_param.data.fill_(1)
        ring.take(9, 9)
        ring.verify()
        ring.rewind(ring.snapshots[0] if kind == "empty" else ring.snapshots[-1])
        assert frozen_param.equal(original)


class Packed(Tensor):
    """An 8-bit weight, as in a quantised model."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any = None, stride: Any = None) -> Packed:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("detach", "clone", "empty_like", "alias"):
            return cls(func(args[0].codes), func(args[0].scale))
        if name == "copy_":
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(name)


def test_quantised_frozen_weight_is_shared_and_rewound() -> None:
    model, optimizer = adapter_run(width=32)
    codes, scale = torch.randint(-99, 99, (64, 64), dtype=torch.int8), torch.rand(64)
    model.register_parameter("packed", nn.Parameter(Packed(codes, scale), requires_grad=False))
    original = codes.clone()
    ring = filled(model, optimizer, size=3)
    assert len({id(t) for s in ring.snapshots for t in s.copy.tensors if isinstance(t, Packed)}) == 1
    codes.add_(1)
    ring.take(9, 9)
    ring.verify()
    assert [s.attempt for s in ring.snapshots][-1] == 2
    ring.rewind(ring.snapshots[-1])
    assert codes.equal(original)


# -- checksums


def test_checksum_detects_any_change_and_reordering() -> None:
    torch.manual_seed(0)
    values = torch.randn(70_001)
    checksums = {int(portable_checksum(values))}
    for change in (
        lambda t: t.neg(),
        lambda t: t.flip(0),
        lambda t: t.roll(1),
        lambda t: torch.cat([t[1:2], t[:1], t[2:]]),
        lambda t: t[:-1],
        lambda t: torch.cat([t[:-1], -t[-1:]]),
    ):
        checksums.add(int(portable_checksum(change(values))))
    assert len(checksums) == 7
    doubles = torch.randn(4096, dtype=torch.float64)
    assert int(portable_checksum(doubles)) != int(portable_checksum(-doubles))


def test_checksums_of_several_tensors_are_in_order() -> None:
    a, b = torch.randn(3, 5), torch.arange(7, dtype=torch.int16)
    measure = Checksummer().measure
    assert measure([a, b]).values() == [*measure([a]).values(), *measure([b]).values()]
    assert measure([a]).values() != measure([b]).values()
    assert leaves(torch.zeros(1).expand(4)) is None


def test_failing_checksums_cost_only_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(Checksummer, "measure", fail)
    model, optimizer = adapter_run()
    ring = filled(model, optimizer)
    assert (len(ring.snapshots), ring.base_nbytes) == (4, 0)
    (message,) = ring.messages
    assert "no kernel image is available" in message
    expected = state_of(model, optimizer)
    model.base.weight.data.zero_()
    ring.rewind(ring.snapshots[-1])
    assert equal(expected, state_of(model, optimizer))

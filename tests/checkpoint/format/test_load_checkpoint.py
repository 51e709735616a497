"""A saved run that is loaded into a new one continues bit for bit."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import rewind_runs
from rewind_runs import Run, same, train_state_of
from save_and_load import hashed, load, save, save_then_load

from surefoot.checkpoint.format.param_names import name_state
from surefoot.checkpoint.format.pieces import nonfinite_params, split_state
from surefoot.checkpoint.train_state import TrainState

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def assert_resume_is_exact(build: Callable[[], Run], folder: Path, **extra_makers: Callable[[Run], Any]) -> None:
    """Three steps, a save, a new run loaded from the files and two more steps equal five steps in a row."""

    def state_of(run: Run) -> TrainState:
        return train_state_of(run, **{name: make(run) for name, make in extra_makers.items()})

    run = build()
    for i in range(3):
        run.train(i)
    state = state_of(run)
    assert not save(state, folder).left_out
    before = hashed(state)
    for i in range(3, 5):
        run.train(i)
    resumed = build()
    torch.manual_seed(99)
    resumed.train(50)
    other = state_of(resumed)
    assert load(other, folder).notes == []
    assert hashed(other) == before
    for i in range(3, 5):
        resumed.train(i)
    assert same(run.contents(), resumed.contents())


@pytest.mark.parametrize(
    ("name", "implementation"), [w for w in rewind_runs.optimizer_variants() if w[1] != "compiled"]
)
def test_every_optimizer_resumes_exactly(name: str, implementation: str, tmp_path: Path) -> None:
    assert_resume_is_exact(lambda: Run(name, implementation), tmp_path)


def test_tensor_lr_is_loaded_in_place(tmp_path: Path) -> None:
    def build() -> Run:
        run = Run()
        run.optimizer = torch.optim.Adam(run.model.parameters(), lr=torch.tensor(0.01), foreach=False)
        run.schedulers = [lr_scheduler.ExponentialLR(run.optimizer, 0.5)]
        return run

    assert_resume_is_exact(build, tmp_path / "saved")
    run = build()
    lr = run.optimizer.param_groups[0]["lr"]
    load(train_state_of(run), tmp_path / "saved")
    assert run.optimizer.param_groups[0]["lr"].data_ptr() == lr.data_ptr()
    assert float(lr) == pytest.approx(0.01 / 8)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "several steps": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda i: 0.9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=3),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "in a row": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 9)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "in a row, chained": lambda o: lr_scheduler.ChainedScheduler(
        [SCHEDULERS["in a row"](o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before")
def test_every_scheduler_resumes_exactly(name: str, tmp_path: Path) -> None:
    def build() -> Run:
        run = Run("SGD")
        run.schedulers = [SCHEDULERS[name](run.optimizer)]
        return run

    assert_resume_is_exact(build, tmp_path)


def test_nested_scheduler_is_restored(tmp_path: Path) -> None:
    class Warmup(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any, after: Any) -> None:
            self.after = after
            super().__init__(optimizer)

        def get_lr(self) -> list[Any]:
            return [0.01 * (self.last_epoch + 1) for _ in self.base_lrs]

        def step(self, epoch: int | None = None) -> None:
            super().step(epoch) if self.last_epoch < 2 else self.after.step()

    def build() -> Run:
        run = Run("SGD")
        run.schedulers = [Warmup(run.optimizer, lr_scheduler.ExponentialLR(run.optimizer, 0.5))]
        return run

    run = build()
    for i in range(5):
        run.train(i)
    resumed = build()
    save_then_load(train_state_of(run), train_state_of(resumed), tmp_path)
    assert resumed.schedulers[0].after.last_epoch == run.schedulers[0].after.last_epoch == 3
    assert resumed.schedulers[0].after.optimizer is resumed.optimizer


@pytest.mark.parametrize("used", [True, False])
def test_loss_scale_is_restored(used: bool, tmp_path: Path) -> None:
    def build() -> Run:
        return Run("SGD", scaled=True)

    if used:
        assert_resume_is_exact(build, tmp_path)
        return
    fresh = build()
    assert save_then_load(train_state_of(fresh), train_state_of(build()), tmp_path).notes == []


def test_disabled_scaler_changes_nothing(tmp_path: Path) -> None:
    def build() -> Run:
        run = Run("SGD")
        run.scaler = torch.amp.GradScaler("cpu", enabled=False)
        return run

    assert_resume_is_exact(build, tmp_path)


def test_added_scaler_is_noted(tmp_path: Path) -> None:
    run = Run("SGD")
    run.train(0)
    save(train_state_of(run), tmp_path)
    assert load(train_state_of(Run("SGD", scaled=True)), tmp_path).notes == [
        "saved without an enabled GradScaler and loaded with one"
    ]


# -- extra state


class NamedPosition(NamedTuple):
    epoch: int
    cursor: int


class AnyState:
    """State of every type that users put into a state_dict."""

    def __init__(self, n: int) -> None:
        self.state: dict[str, Any] = {
            "nested": (1, [n, (2.5, None)], {"a": {"b": (n,)}}),
            "window": deque([1.0, float("nan"), float("inf")] if n else [], maxlen=5),
            "array": np.arange(6, dtype=np.float32).reshape(2, 3) * n,
            "words": np.array(["a", "bc"]),
            "scalar": np.float64(n),
            "raw": bytes([n, 255]),
            "seen": {n, 3, 4},
            "frozen": frozenset({"x", "y"}),
            "by number": {1: n, (2, 3): "pair", "$dict": n},
            "ordered": OrderedDict(z=n, a=1),
            "complex": complex(n, float("-inf")),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "place": NamedPosition(n, 7),
            "long": 3**n * 10**2000,
            "tensors": [torch.full((2, 2), n), {"deep": torch.tensor(n)}],
            "a": {"b": torch.tensor([n])},
            "a.b": torch.tensor([n + 1]),
            "text": "\ud800 \0 ü",
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and type(a) in (type(b), NamedPosition) and all(map(alike, a, b))
    if isinstance(a, Tensor):
        return bool(a.equal(b)) and a.dtype == b.dtype
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and bool(np.array_equal(a, b))
    return type(a) is type(b) and (a == b or a != a)


def test_extra_state_of_any_plain_type_is_restored(tmp_path: Path) -> None:
    saved_object, loaded_object = AnyState(7), AnyState(0)
    run = Run()
    save_then_load(
        train_state_of(run, extra={"odd": saved_object}), train_state_of(Run(), extra={"odd": loaded_object}), tmp_path
    )
    assert alike(AnyState(7).state, loaded_object.state)
    assert loaded_object.state["window"].maxlen == 5


def test_state_that_cannot_be_saved_is_listed_and_unchanged(tmp_path: Path) -> None:
    class Holder:
        def __init__(self, n: int) -> None:
            self.state = {"n": n, "call": [].append, "sparse": torch.eye(2).to_sparse() * n, "path": Path(str(n))}

        state_dict = AnyState.state_dict
        load_state_dict = AnyState.load_state_dict

    saved_object, loaded_object = Holder(1), Holder(2)
    left_out = save(train_state_of(Run(), extra={"it": saved_object}), tmp_path).left_out
    assert [part.split(" ")[0] for part in left_out] == ["extra.it.call", "extra.it.sparse", "extra.it.path"]
    load(train_state_of(Run(), extra={"it": loaded_object}), tmp_path)
    assert loaded_object.state["n"] == 1
    assert loaded_object.state["path"] == Path("2")


def test_averaged_weights_and_generators_are_restored(tmp_path: Path) -> None:
    def build() -> tuple[Run, dict[str, Any]]:
        run = Run()
        ema = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        return run, {"ema": ema, "draw": torch.Generator().manual_seed(3)}

    run, extra = build()
    for i in range(3):
        run.train(i)
        extra["ema"].update_parameters(run.model)
    torch.rand(5, generator=extra["draw"])
    state = train_state_of(run, extra=extra)
    resumed, other_extra = build()
    restored = save_then_load(state, train_state_of(resumed, extra=other_extra), tmp_path)
    assert restored.notes == []
    assert same(dict(extra["ema"].state_dict()), dict(other_extra["ema"].state_dict()))
    assert torch.rand(5, generator=extra["draw"]).equal(torch.rand(5, generator=other_extra["draw"]))


def test_added_and_removed_extra_state_is_noted(tmp_path: Path) -> None:
    run = Run()
    save(train_state_of(run, extra={"old": AnyState(1), "ema": nn.Linear(2, 2)}), tmp_path)
    restored = load(train_state_of(Run(), extra={"new": AnyState(2), "other": nn.Linear(2, 2)}), tmp_path)
    assert sorted(restored.notes) == [
        "extra.ema was saved but does not exist now",
        "extra.other was not saved and keeps its values",
        "extra['new'] was not saved and keeps its state",
        "extra['old'] was saved but does not exist now",
    ]


# -- tensors of every kind


class Tensors(nn.Module):
    """Every kind of tensor that a module may have."""

    def __init__(self, n: float) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(n))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.small = nn.Parameter(torch.full((3,), n, dtype=torch.float16))
        self.brain = nn.Parameter(torch.full((3, 5), n, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.full((2,), n, dtype=torch.float64))
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).add(n).t())
        self.last = nn.Parameter(torch.rand(2, 3, 4, 5).add(n).to(memory_format=torch.channels_last))
        self.wave = nn.Parameter(torch.full((2, 3), complex(n, -n)))
        for dtype in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"):
            self.register_buffer(dtype, torch.full((5,), n).to(getattr(torch, dtype)))
        for dtype in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "complex128"):
            self.register_buffer(dtype, torch.full((2, 3), int(n)).to(getattr(torch, dtype)))
        self.register_buffer("mask", torch.tensor([True, n > 1]))
        self.register_buffer("expanded", torch.tensor([[n]]).expand(3, 4))
        self.register_buffer("passing", torch.full((4,), n), persistent=False)
        self.register_buffer("later", None)
        self.register_buffer("nan", torch.tensor([float("nan"), -0.0, 1e-42]))


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def test_tensors_of_every_dtype_and_layout_are_bit_identical(tmp_path: Path) -> None:
    saved_model, loaded_model = Tensors(4.0), Tensors(1.0)
    saved_model.later = torch.ones(2)
    before = {name: t.data_ptr() for name, t in loaded_model.named_parameters()}
    states = [TrainState(m, torch.optim.SGD([m.scalar], lr=0.1)) for m in (saved_model, loaded_model)]
    assert save_then_load(*states, tmp_path).notes == []
    for (name, a), (other, b) in zip(_all(saved_model), _all(loaded_model), strict=True):
        assert name == other
        assert a.dtype == b.dtype
        assert bits(a) == bits(b), name
    assert {name: t.data_ptr() for name, t in loaded_model.named_parameters()} == before
    assert loaded_model.expanded.stride() == (0, 0)


def _all(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def test_non_persistent_buffer_may_change_shape(tmp_path: Path) -> None:
    saved_model, loaded_model = nn.Linear(2, 2), nn.Linear(2, 2)
    saved_model.register_buffer("cache", torch.ones(5), persistent=False)
    loaded_model.register_buffer("cache", torch.ones(3), persistent=False)
    save(TrainState(saved_model, torch.optim.SGD(saved_model.parameters())), tmp_path)
    (note,) = load(TrainState(loaded_model, torch.optim.SGD(loaded_model.parameters())), tmp_path).notes
    assert "keeps its value" in note
    assert loaded_model.cache.shape == (3,)


def test_buffer_of_another_shape_is_replaced(tmp_path: Path) -> None:
    saved_model, loaded_model = nn.Linear(2, 2), nn.Linear(2, 2)
    saved_model.register_buffer("seen", torch.ones(5))
    loaded_model.register_buffer("seen", torch.zeros(3))
    save_then_load(*(TrainState(m, torch.optim.SGD(m.parameters())) for m in (saved_model, loaded_model)), tmp_path)
    assert loaded_model.seen.equal(torch.ones(5))


# -- model structure


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.table.weight


def adam(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    return optimizer


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    saved_model, loaded_model = Tied(), Tied()
    pieces = save(TrainState(saved_model, adam(saved_model)), tmp_path)
    assert [name for name in pieces.shards if name.startswith("model.")] == ["model.table.weight"]
    assert load(TrainState(loaded_model, adam(loaded_model)), tmp_path).notes == []
    assert loaded_model.head.weight is loaded_model.table.weight
    assert loaded_model.head.weight.equal(saved_model.head.weight)


def test_weights_that_are_no_longer_tied_get_the_same_values(tmp_path: Path) -> None:
    saved_model, loaded_model = Tied(), Tied(tied=False)
    save(TrainState(saved_model, torch.optim.SGD([saved_model.table.weight])), tmp_path)
    (note,) = load(TrainState(loaded_model, torch.optim.SGD([loaded_model.table.weight])), tmp_path).notes
    assert note.startswith("tied when saved but not now")
    assert loaded_model.head.weight.equal(saved_model.table.weight)
    assert loaded_model.table.weight.equal(saved_model.table.weight)


def test_newly_tied_weights_are_noted(tmp_path: Path) -> None:
    saved_model, loaded_model = Tied(tied=False), Tied()
    save(TrainState(saved_model, torch.optim.SGD([saved_model.table.weight])), tmp_path)
    (note,) = load(TrainState(loaded_model, torch.optim.SGD([loaded_model.table.weight])), tmp_path).notes
    assert note.startswith("tied now but not when saved")
    assert loaded_model.head.weight.equal(saved_model.table.weight)


@pytest.mark.parametrize("first", [True, False])
def test_compiled_and_plain_models_load_each_others_checkpoints(first: bool, tmp_path: Path) -> None:
    def build(compiled: bool) -> TrainState:
        model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        if compiled:
            model[0] = torch.compile(model[0], backend="eager")
            model = torch.compile(model, backend="eager")
        return TrainState(model, adam(model))

    save_then_load(build(first), build(not first), tmp_path)


def test_several_optimizers_and_parameters_outside_the_model(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[TrainState, nn.Parameter]:
        torch.manual_seed(seed)
        model, alone = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), nn.Parameter(torch.rand(4))
        alone.grad = torch.ones(4)
        sgd = torch.optim.SGD([{"params": model[1].parameters()}, {"params": [alone], "lr": 0.5 * seed}], momentum=0.9)
        sgd.step()
        return TrainState(model, [adam(model[0]), sgd]), alone

    (first, saved_param), (second, loaded_param) = build(1), build(2)
    save_then_load(first, second, tmp_path)
    assert saved_param.equal(loaded_param)
    assert second.optimizers[1].param_groups[1]["lr"] == 0.5


def test_parameters_in_another_order_are_matched_by_name(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    first, second = (torch.optim.Adam(m.parameters()) for m in models)
    for n, p in enumerate(models[0].parameters()):
        p.grad = torch.full_like(p, n + 1)
    first.step()
    second.param_groups[0]["params"].reverse()
    save(TrainState(models[0], first), tmp_path)
    (note,) = load(TrainState(models[1], second), tmp_path).notes
    assert "another order" in note
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert first.state[p]["exp_avg"].equal(second.state[q]["exp_avg"])


def test_parameters_in_other_groups_are_matched_by_name(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    orders = ((0, 0.1), (1, 0.2)), ((1, 0.3), (0, 0.4))
    first, second = (
        torch.optim.Adam([{"params": list(m[i].parameters()), "lr": lr} for i, lr in order])
        for m, order in zip(models, orders, strict=True)
    )
    save(TrainState(models[0], first), tmp_path)
    (note,) = load(TrainState(models[1], second), tmp_path).notes
    assert "grouped differently" in note
    assert [g["lr"] for g in second.param_groups] == [0.2, 0.1]


def test_existing_state_is_written_in_place(tmp_path: Path) -> None:
    run = Run()
    run.train(0)
    save(train_state_of(run), tmp_path)
    run.train(1)
    addresses = run.addresses()
    load(train_state_of(run), tmp_path)
    assert run.addresses() == addresses


def test_one_changed_bit_changes_the_hash() -> None:
    run = Run()
    run.train(0)
    state = train_state_of(run)
    before = hashed(state)
    assert hashed(state) == before
    with torch.no_grad():
        next(iter(run.optimizer.state.values()))["exp_avg"].view(torch.int32)[0, 0] ^= 1
    assert hashed(state) != before


@pytest.mark.parametrize("name", ["scalar", "small", "wave", "turned"])
def test_nonfinite_weights_are_named(name: str) -> None:
    model = Tensors(1.0)
    model.tiny = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    train_state = TrainState(model, torch.optim.SGD(model.parameters()))
    assert nonfinite_params(split_state(train_state.capture(), name_state(train_state))) == []
    with torch.no_grad():
        getattr(model, name).fill_(float("inf"))
    assert nonfinite_params(split_state(train_state.capture(), name_state(train_state))) == [f"model.{name}"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_one_nonfinite_value_in_a_large_tensor_is_found(kind: torch.dtype, bad: str, device: str) -> None:
    model = nn.ParameterList([torch.ones(300_000, dtype=kind), torch.ones(0), torch.ones(3)]).to(device)
    train_state = TrainState(model, torch.optim.SGD(model.parameters()))
    with torch.no_grad():
        model[0][299_000] = float(bad)
    assert nonfinite_params(split_state(train_state.capture(), name_state(train_state))) == ["model.0"]


@needs_cuda
@pytest.mark.parametrize(("before", "after"), [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("implementation", ["plain", "foreach", "fused"])
def test_checkpoint_moves_between_devices(before: str, after: str, implementation: str, tmp_path: Path) -> None:
    run, other = Run(implementation=implementation, device=before), Run(implementation=implementation, device=after)
    for i in range(3):
        run.train(i)
    save(train_state_of(run), tmp_path)
    load(train_state_of(other), tmp_path)
    saved_contents, loaded_contents = run.contents(), other.contents()
    assert same(
        [saved_contents[k] for k in ("model", "state", "groups")],
        [loaded_contents[k] for k in ("model", "state", "groups")],
    )
    other.train(3)

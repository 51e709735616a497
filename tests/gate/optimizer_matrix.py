"""The cells of the optimizer matrix: every class in torch.optim, every mode of its step, every fault."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot

WARMUP = 6

CLASSES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)
NEEDS_CLOSURE = {"LBFGS"}
NEEDS_SPARSE = {"SparseAdam"}
TAKES_SPARSE = {"SGD", "Adagrad", "SparseAdam"}
EXTRA: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "RMSprop": {"momentum": 0.9},
    "LBFGS": {"lr": 0.1, "max_iter": 4},
    "Adadelta": {"lr": 0.1},
}
HOW = ("compiled", "closure", "scaler", "unscaled")
MODES = ("plain", "foreach", "fused", *HOW, *(f"fused {how}" for how in HOW), "sparse")
FAULTS = ("nan", "burst")
BUFFER = "buffer"
"""A value that makes a running variance infinite while loss and gradients stay finite."""


def is_supported(name: str, mode: str) -> bool:
    """Whether torch supports this class in this mode."""
    parameters = inspect.signature(getattr(torch.optim, name)).parameters
    if mode == "sparse":
        return name in TAKES_SPARSE
    if name in NEEDS_SPARSE:
        return mode in ("plain", "closure")
    if name in NEEDS_CLOSURE:
        return mode == "closure"
    return all(option in parameters for option in mode.split() if option in ("foreach", "fused"))


def cells() -> Iterator[tuple[str, str, str, str]]:
    """Class, mode, fault and moment; on the first step there is no norm outlier yet."""
    for name in CLASSES:
        for mode in MODES:
            if is_supported(name, mode):
                yield name, mode, "nan", "first"
                yield from ((name, mode, fault, "later") for fault in FAULTS)
                if mode != "sparse" and name not in NEEDS_SPARSE:
                    yield name, mode, BUFFER, "later"


class Dense(nn.Module):
    """Matrices only, so that every optimizer supports it, and running statistics that a bad batch corrupts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.last = nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Sparse(nn.Module):
    """An embedding with sparse gradients, and a buffer that every forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.table((x[:, 0].nan_to_num() * 3).long().clamp(0, 11)))
        return rows.sum(1, keepdim=True) + x.sum(1, keepdim=True) * 0


def build(name: str, mode: str, model: nn.Module) -> torch.optim.Optimizer:
    options = dict(EXTRA.get(name, {}))
    if mode == "sparse":
        options.pop("momentum", None)  # torch has no momentum for sparse gradients
    parameters = inspect.signature(getattr(torch.optim, name)).parameters
    options |= {k: k in mode for k in ("foreach", "fused") if k in parameters and (k in mode or mode == "plain")}
    return getattr(torch.optim, name)(model.parameters(), **options)


def batch(i: int, fault: str | None = None, device: str = "cpu") -> tuple[Tensor, Tensor, float]:
    """Inputs, targets and what the loss is multiplied by."""
    g = torch.Generator().manual_seed(i)
    x = torch.randn(16, 6, generator=g)
    y = x.sum(1, keepdim=True).sin()
    if fault == "nan":
        x[3, 2] = float("nan")
    if fault == BUFFER:
        x[3, 2] = 1e30
    return x.to(device), y.to(device), 1e6 if fault == "burst" else 1.0


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    states = [{i: dict(s) for i, s in enumerate(o.state.values())} for o in optimizers]
    return copy.deepcopy({"model": model.state_dict(), "optimizers": states})


def same(a: Any, b: Any) -> bool:
    """Bit-identical, through any nesting."""
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
        )  # compiling moves step counters to the device
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def refused_step_leaves_no_trace(
    name: str, mode: str, fault: str, when: str, *, run_dir: Path, device: str, backend: str = "eager"
) -> None:
    """One cell: some healthy steps, one with the fault, one more healthy one."""
    torch.manual_seed(0)
    sparse = mode == "sparse" or name in NEEDS_SPARSE
    model = (Sparse() if sparse else Dense()).to(device)
    optimizer = build(name, mode, model)
    scaler = torch.amp.GradScaler(device) if "scale" in mode else None
    policy = surefoot.Policy(warmup=WARMUP - 1)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, policy=policy, scaler=scaler)
    train = stepper(mode, model, optimizer, guard.watch, scaler, backend)
    healthy = 0 if when == "first" else WARMUP
    for i in range(healthy):
        train(i, None)
    before = snapshot(model, optimizer)
    train(healthy, fault)
    assert same(before, snapshot(model, optimizer)), "bit-identical after a refusal"
    train(healthy + 1, None)
    assert not same(before["model"], snapshot(model, optimizer)["model"]), "a healthy step is applied again"
    guard.close()
    verdicts = surefoot.read(run_dir).scalars["verdict"].tolist()
    assert verdicts == [0] * healthy + [2 if fault == "burst" else 1, 0]


def stepper(
    mode: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    watch: Callable[[Tensor, Any], Tensor],
    scaler: Any,
    backend: str,
) -> Callable[[int, str | None], None]:
    """A training step in the given mode."""
    step = torch.compile(optimizer.step, backend=backend) if "compiled" in mode else optimizer.step

    def loss_of(i: int, fault: str | None) -> Tensor:
        x, y, factor = batch(i, fault, str(next(model.parameters()).device))
        return watch((model(x) - y).square().mean() * factor, x)

    def train(i: int, fault: str | None = None) -> None:
        if "closure" in mode:

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(i, fault)
                loss.backward()
                return loss

            optimizer.step(closure)
            return
        optimizer.zero_grad()
        if scaler is None:
            loss_of(i, fault).backward()
            step()
            return
        scaler.scale(loss_of(i, fault)).backward()
        if "unscaled" in mode:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return train

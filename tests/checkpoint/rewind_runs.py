"""Small runs with much state: dropout, batch norm, schedules, loss scaling, every optimizer class."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from surefoot.checkpoint.train_state import TrainState

CLASSES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
)
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "LBFGS": {"lr": 0.1, "max_iter": 3, "history_size": 4},
    "Adam": {"amsgrad": True},
}


def optimizer_variants() -> list[tuple[str, str]]:
    """Every optimizer class with every implementation that torch offers for it."""
    variants: list[tuple[str, str]] = []
    for name in CLASSES:
        parameters = inspect.signature(getattr(torch.optim, name)).parameters
        variants.append((name, "closure" if name == "LBFGS" else "plain"))
        variants += [(name, implementation) for implementation in ("foreach", "fused") if implementation in parameters]
    return [*variants, ("AdamW", "closure"), ("AdamW", "compiled"), ("SGD", "compiled")]


class Net(nn.Module):
    """Matrices only, so that every class takes it; random numbers and running statistics in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4, sparse=True)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x[:, 0].nan_to_num() * 3).long().clamp(0, 11))
        return self.drop(rows).sum(1, keepdim=True) + x.sum(1, keepdim=True) * 0


class Run:
    """A model in training; step `i` depends on `i` and on the run's own state only."""

    def __init__(
        self, name: str = "AdamW", implementation: str = "plain", *, device: str = "cpu", scaled: bool = False
    ) -> None:
        seed()
        self.implementation, self.device = implementation, device
        self.model: nn.Module = (SparseNet() if name == "SparseAdam" else Net()).to(device)
        self.forward: Callable[[Tensor], Tensor] = self.model
        options: dict[str, Any] = {"lr": 0.01} | OPTIONS.get(name, {})
        options |= {implementation: True} if implementation in ("foreach", "fused") else {}
        self.optimizer: Optimizer = getattr(torch.optim, name)(self.model.parameters(), **options)
        self.compiled = torch.compile(self.optimizer.step, backend="eager") if implementation == "compiled" else None
        self.schedulers: list[Any] = []
        self.scaler = torch.amp.GradScaler(device, growth_interval=2) if scaled else None

    def loss(self, i: int, factor: float) -> Tensor:
        x, y = batch(i)
        x = x + random.random() * 0.01 + float(np.random.rand()) * 0.01
        loss = (self.forward(x.to(self.device)) - y.to(self.device)).square().mean() * factor
        return loss if self.scaler is None else self.scaler.scale(loss)

    def train(self, i: int, factor: float = 1.0, *, midway: Callable[[], None] | None = None) -> None:
        """One step; `midway` is called after the optimizer's and before the schedule's, as a hook would be."""

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(i, factor)
            loss.backward()
            return loss

        hook = None if midway is None else self.optimizer.register_step_post_hook(lambda *_: midway())
        if self.implementation == "closure":
            self.optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        elif self.scaler is None:
            closure()
            (self.compiled or self.optimizer.step)()
        else:
            closure()
            self.scaler.step(self.optimizer)
            if hook is not None:
                hook.remove()
            self.scaler.update()
        if hook is not None:
            hook.remove()
        for scheduler in self.schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([float(i)] if plateau else []))

    def contents(self) -> Any:
        """All state of the run, to be compared bit by bit."""
        return plain_copy(
            {
                "model": self.model.state_dict(),
                "state": [dict(s) for s in self.optimizer.state.values()],
                "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
                "schedulers": [s.state_dict() for s in self.schedulers],
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "random": [random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()],
            }
        )

    def addresses(self) -> list[int]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [(t.to_local() if isinstance(t, DTensor) else t).data_ptr() for t in tensors]


def train_state_of(run: Run, **more: Any) -> TrainState:
    return TrainState(run.model, run.optimizer, scheduler=run.schedulers, scaler=run.scaler, **more)


def batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    x = torch.randn(16, 6, generator=g)
    return x, x.sum(1, keepdim=True).sin()


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def plain_copy(value: Any) -> Any:
    """A deep copy in which a DTensor is replaced by its local shard."""
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: plain_copy(v) for k, v in value.items()}
    if hasattr(value, "state_dict"):
        return plain_copy(value.state_dict())
    return [plain_copy(v) for v in value] if isinstance(value, list | tuple) else copy.deepcopy(value)


def same(a: Any, b: Any) -> bool:
    """Bit-identical, through any nesting."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.cpu().equal(b.cpu())
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b

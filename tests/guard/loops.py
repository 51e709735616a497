"""A small model, its batches, faults to plant in them, and the plain training loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Watch = Callable[..., Tensor]


class Net(nn.Module):
    """Weights, biases, and buffers that a bad batch damages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))[:, 0]


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(i: int, size: int = 16) -> Tensor:
    """The same batch for the same number."""
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(1000 + i))


def loss_of(model: nn.Module, x: Tensor, fault: str | None = None) -> Tensor:
    """A healthy or faulty loss: 'nan' in the data, 'burst' in the gradients, 'inf' in the loss alone."""
    x = x * math.nan if fault == "nan" else x
    loss = (model(x) - x.detach().sum(1)).square().mean()
    if fault == "burst":
        return loss * 1e6
    return loss + (loss.detach() * math.inf if fault == "inf" else 0.0)


def train(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], watch: Watch, i: int, fault: str | None = None
) -> Tensor:
    """One update of the plain loop."""
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    x = batch(i)
    loss = watch(loss_of(model, x, fault), x)
    loss.backward()
    for o in optimizers:
        o.step()
    for o in optimizers:
        o.zero_grad()
    return loss.detach()


def bare(loss: Tensor, batch: Any = None) -> Tensor:
    """Replaces `guard.watch` in an unguarded loop."""
    return loss


def snapshot(model: nn.Module, *optimizers: Optimizer) -> Any:
    """Weights, buffers and optimizer state as they are now."""
    return copy.deepcopy([model.state_dict(), [o.state_dict() for o in optimizers]])


def same(a: Any, b: Any) -> bool:
    """Whether both are bit-identical."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def hooks_on(model: nn.Module, *optimizers: Optimizer) -> list[str]:
    """Names of all hooks on a model and its optimizers."""
    hooked = [name for o in optimizers for name, v in vars(o).items() if name.endswith("_hooks") and v]
    hooked += [name for o in optimizers for name in ("found_inf", "grad_scale") if hasattr(o, name)]
    for module in model.modules():
        hooked += [name for name, v in vars(module).items() if name.endswith("_hooks") and v]
    for p in model.parameters():
        hooked += ["tensor hooks"] if p._backward_hooks else []
    return hooked

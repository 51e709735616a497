"""A refused batch and a rewind leave no trace in any optimizer's weights, state, groups and counters, bit for bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import surefoot
from surefoot.checkpoint.train_state import TrainState

pytorch_optimizer = pytest.importorskip("pytorch_optimizer.optimizer", reason="pytorch_optimizer is not installed")

OTHERS: dict[str, Any] = dict(pytorch_optimizer.OPTIMIZERS)
TORCH_OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
NAMES = [*(f"torch.{name}" for name in sorted(TORCH_OPTIMIZERS)), *sorted(OTHERS)]
SKIPPED = {
    "torch.SparseAdam": "takes sparse gradients only; tested in test_matrix.py",
    "adalomo": "steps inside backward",
    "lomo": "steps inside backward",
    "distributedmuon": "needs a process group",
    "demo": "needs einops and a process group",
    "bsam": "fails without a guard too",
}
NOT_RESTORED = {"magma": "keeps averages outside of its state"}
"""Optimizers that are not restored completely, and why."""
CLOSURE = {"torch.LBFGS", "lbfgs", "alig"}
CREATES_GRAPH = {"adahessian", "sophiah"}
MATRICES = {"torch.Muon", "spectralsphere"}
GROUPED = {"adago", "adamuon", "muon", "muonclip", "normuon"}
"""Take a use_muon flag per parameter group."""
OPTIONS: dict[str, dict[str, Any]] = {
    "torch.SGD": {"lr": 1e-2, "momentum": 0.9},
    "ranger21": {"num_iterations": 20},
}
pytestmark = pytest.mark.filterwarnings("ignore")  # from the optimizers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))[:, 0]


class Run:
    """A model, its optimizer and the training loop."""

    def __init__(self, name: str, run_dir: Path) -> None:
        torch.manual_seed(0)
        self.name, self.run_dir = name, run_dir
        self.model = Net()
        self.optimizer = build(name, self.model)
        self.guard = surefoot.attach(self.model, self.optimizer, run_dir=run_dir)

    def train(self, i: int, *, bad: bool = False) -> None:
        torch.manual_seed(100 + i)  # some optimizers draw random numbers in step()
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
        target = x.sum(1).sin()
        if bad:
            x[0, 0] = float("nan")

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.guard.watch((self.model(x) - target).square().mean(), x)
            loss.backward(create_graph=self.name in CREATES_GRAPH)
            return loss

        if self.name in CLOSURE:
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()

    def contents(self) -> dict[str, Any]:
        names: dict[Any, str] = {p: n for n, p in self.model.named_parameters()}
        o = self.optimizer
        return copy.deepcopy(
            {
                "weights": dict(self.model.state_dict()),
                "state": {names.get(p, str(p)): state for p, state in o.state.items()},
                "groups": [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups],
                "attributes": {k: v for k, v in vars(o).items() if type(v) in (int, float, bool)},
            }
        )

    def verdicts(self) -> list[int]:
        self.guard.close()
        run = surefoot.read(self.run_dir)
        assert not [e for e in run.events if e.get("name") == "degraded"]
        per_attempt = dict(zip(run.scalars["attempt"].tolist(), run.scalars["verdict"].tolist(), strict=True))
        return list(per_attempt.values())


def build(name: str, model: nn.Module) -> Optimizer:
    kind = TORCH_OPTIMIZERS[name.removeprefix("torch.")] if name.startswith("torch.") else OTHERS[name]
    options = OPTIONS.get(name, {"lr": 1e-3} if name.startswith("torch.") else {})
    if name == "adammini":
        return kind(model, **options)
    params: Any = [p for p in model.parameters() if p.ndim == 2 or name not in MATRICES]
    if name in GROUPED:
        params = [{"params": [p for p in params if (p.ndim == 2) is use], "use_muon": use} for use in (True, False)]
    return kind(params, **options)


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Paths at which two nested values are not bit-identical."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        return [] if equal else [at]
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{at}/{k}" for k in a.keys() ^ b.keys()]
        return missing + [d for k in a.keys() & b.keys() for d in differences(a[k], b[k], f"{at}/{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [d for i, pair in enumerate(zip(a, b, strict=True)) for d in differences(*pair, f"{at}/{i}")]
    plain = isinstance(a, int | float | str | bool | None)
    return [at] if type(a) is not type(b) or (plain and a != b and a == a) else []


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str, str], Run]:
    def start(name: str, run_dir: str) -> Run:
        if name in SKIPPED:
            pytest.skip(SKIPPED[name])
        return Run(name, tmp_path / run_dir)

    return start


@pytest.mark.parametrize("name", NAMES)
def test_refused_batch_leaves_no_trace(name: str, start: Callable[[str, str], Run]) -> None:
    run, without = start(name, "with"), start(name, "without")
    for i in (0, 1, 2, 3, 4, 5):
        run.train(i, bad=i == 3)
    for i in (0, 1, 2, 4, 5):
        without.train(i)
    assert differences(without.contents(), run.contents()) == []
    assert run.verdicts() == [0, 0, 0, 1, 0, 0]
    without.guard.close()


@pytest.mark.parametrize("name", NAMES)
def test_restored_run_continues_exactly(name: str, start: Callable[[str, str], Run]) -> None:
    if name in NOT_RESTORED:
        pytest.skip(NOT_RESTORED[name])
    run, without = start(name, "with"), start(name, "without")
    train_state: TrainState = run.guard._recovery._train_state  # pyright: ignore[reportAttributeAccessIssue]
    first = train_state.capture()
    for i in (7, 8):
        run.train(i)
    train_state.restore(first)
    for i in (0, 1, 2):
        run.train(i)
    second = train_state.capture()
    for i in (3, 4):
        run.train(i)
    train_state.restore(second)
    run.train(5)
    for i in (0, 1, 2, 5):
        without.train(i)
    assert differences(without.contents(), run.contents()) == []
    run.guard.close()
    without.guard.close()

"""A refused batch and a rewind leave no trace in any optimizer: weights, state, groups and counters, bit for bit."""

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

more = pytest.importorskip("pytorch_optimizer.optimizer", reason="pytorch_optimizer is not installed")

OTHERS: dict[str, Any] = dict(more.OPTIMIZERS)
OWN = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
NAMES = [*(f"torch.{name}" for name in sorted(OWN)), *sorted(OTHERS)]
SKIPPED = {
    "torch.SparseAdam": "takes sparse gradients only; test_matrix.py has it",
    "adalomo": "steps inside backward",
    "lomo": "steps inside backward",
    "distributedmuon": "needs a process group",
    "demo": "needs einops and a process group",
    "bsam": "fails by itself, without a guard too",
}
OUTSIDE = {"magma": "keeps averages in a mapping of its own, outside of its state"}
"""Those that do not go back whole, and why."""
CLOSURE = {"torch.LBFGS", "lbfgs", "alig"}
CREATES_GRAPH = {"adahessian", "sophiah"}
MATRICES = {"torch.Muon", "spectralsphere"}
GROUPED = {"adago", "adamuon", "muon", "muonclip", "normuon"}
"""Want to be told which parameters are matrices."""
OPTIONS: dict[str, dict[str, Any]] = {
    "torch.SGD": {"lr": 1e-2, "momentum": 0.9},
    "ranger21": {"num_iterations": 20},
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the optimizers' own


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))[:, 0]


class Run:
    """One model, its optimizer and the loop around them."""

    def __init__(self, name: str, run_dir: Path) -> None:
        torch.manual_seed(0)
        self.name, self.run_dir = name, run_dir
        self.model = Net()
        self.optimizer = build(name, self.model)
        self.guard = surefoot.attach(self.model, self.optimizer, run_dir=run_dir)

    def train(self, i: int, *, bad: bool = False) -> None:
        torch.manual_seed(100 + i)  # some draw random numbers in their step
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
                "state": {names.get(p, str(p)): held for p, held in o.state.items()},
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
    kind = OWN[name.removeprefix("torch.")] if name.startswith("torch.") else OTHERS[name]
    options = OPTIONS.get(name, {"lr": 1e-3} if name.startswith("torch.") else {})
    if name == "adammini":
        return kind(model, **options)
    params: Any = [p for p in model.parameters() if p.ndim == 2 or name not in MATRICES]
    if name in GROUPED:
        params = [{"params": [p for p in params if (p.ndim == 2) is use], "use_muon": use} for use in (True, False)]
    return kind(params, **options)


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two nested contents are not the same to the bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        return [] if alike else [at]
    if isinstance(a, dict) and isinstance(b, dict):
        lacking = [f"{at}/{k}" for k in a.keys() ^ b.keys()]
        return lacking + [d for k in a.keys() & b.keys() for d in differences(a[k], b[k], f"{at}/{k}")]
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
def test_a_refused_batch_leaves_no_trace(name: str, start: Callable[[str, str], Run]) -> None:
    run, without = start(name, "with"), start(name, "without")
    for i in (0, 1, 2, 3, 4, 5):
        run.train(i, bad=i == 3)
    for i in (0, 1, 2, 4, 5):
        without.train(i)
    assert differences(without.contents(), run.contents()) == []
    assert run.verdicts() == [0, 0, 0, 1, 0, 0]
    without.guard.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_goes_back_goes_on_as_if_it_had_never_been_there(
    name: str, start: Callable[[str, str], Run]
) -> None:
    if name in OUTSIDE:
        pytest.skip(OUTSIDE[name])
    run, without = start(name, "with"), start(name, "without")
    whole: TrainState = run.guard._recovery._train_state  # pyright: ignore[reportAttributeAccessIssue]
    first = whole.capture()
    for i in (7, 8):
        run.train(i)
    whole.restore(first)
    for i in (0, 1, 2):
        run.train(i)
    second = whole.capture()
    for i in (3, 4):
        run.train(i)
    whole.restore(second)
    run.train(5)
    for i in (0, 1, 2, 5):
        without.train(i)
    assert differences(without.contents(), run.contents()) == []
    run.guard.close()
    without.guard.close()

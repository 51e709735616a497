"""Unusual state: odd tensors, nesting, state that appears or disappears, and the loop's own objects."""

from __future__ import annotations

import operator
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from rewind_runs import Run, same, train_state_of

from surefoot.checkpoint.train_state import TrainState


class Mixed(nn.Module):
    """Tensors of every kind a model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).t())
        self.tied = self.weight
        self.brief = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.single = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.nowhere = nn.Parameter(torch.zeros(2, device="meta"))
        self.lazy = nn.LazyLinear(3)
        for name, t in {
            "count": torch.tensor(5),
            "mask": torch.ones(2, 2, dtype=torch.bool),
            "small": torch.ones(2, dtype=torch.float16),
            "wave": torch.ones(2, dtype=torch.complex64),
            "slice": torch.arange(12.0).view(3, 4)[:, 1:3],
            "wide": torch.arange(3.0).expand(2, 3),
            "graph": torch.eye(3).to_sparse(),
            "rows": torch.eye(3).to_sparse_csr(),
        }.items():
            self.register_buffer(name, t)
        with torch.inference_mode():
            self.register_buffer("cache", torch.ones(3))
        self.register_buffer("nothing", None)


def initialized_tensors(model: nn.Module) -> list[Tensor]:
    return [t for t in [*model.parameters(), *model.buffers()] if not isinstance(t, nn.UninitializedParameter)]


@torch.no_grad()
def change_all(model: Mixed) -> None:
    for t in initialized_tensors(model):
        if t is model.wide:
            t[0].add_(1)
        elif t.dtype is torch.bool:
            t.logical_not_()
        elif t.layout is torch.sparse_coo:
            t.copy_(torch.ones(3, 3).to_sparse())
        elif t.layout is torch.sparse_csr:
            t.values().mul_(3)
        elif t is not model.cache and not t.is_meta:
            t.mul_(3)
    with torch.inference_mode():
        model.cache.mul_(3)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_of_every_kind() -> None:
    model = Mixed()
    outside_param = nn.Parameter(torch.ones(2))
    run = TrainState(model, torch.optim.SGD([model.weight, model.brief, outside_param], lr=0.1))
    state = run.capture()
    for _ in range(2):
        before = [t if t.is_meta else t.detach().clone() for t in initialized_tensors(model)]
        tensors = initialized_tensors(model)
        change_all(model)
        outside_param.data.zero_()
        run.restore(state)
        assert all(map(operator.is_, initialized_tensors(model), tensors))
        assert all(a.is_meta or a.to_dense().equal(b.to_dense()) for a, b in zip(before, tensors, strict=True))
        assert outside_param.tolist() == [1.0, 1.0]
        assert model.tied is model.weight
        assert model.graph._nnz() == 3
        run.capture(state)


def test_restore_does_not_bump_version_counters() -> None:
    weight = nn.Parameter(torch.ones(3))
    model = nn.ParameterList([weight])
    run = TrainState(model, torch.optim.SGD(model.parameters()))
    state, version = run.capture(), weight._version
    run.restore(state)
    assert weight._version == version
    assert weight.requires_grad


def test_shared_state_tensors_are_shared_again() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights)
    run = TrainState(nn.ParameterList(weights), optimizer)
    step_tensor = torch.tensor(1.0)
    optimizer.state[weights[0]], optimizer.state[weights[1]] = {"step": step_tensor}, {"step": step_tensor}
    shared = run.capture()
    optimizer.state[weights[1]] = {"step": torch.tensor(2.0)}
    separate = run.capture()
    optimizer.state[weights[1]]["step"] = step_tensor
    run.restore(separate)
    assert [float(optimizer.state[w]["step"]) for w in weights] == [1.0, 2.0]
    run.restore(shared)
    assert optimizer.state[weights[0]]["step"] is optimizer.state[weights[1]]["step"]


def test_nested_and_plain_optimizer_state_is_restored() -> None:
    run = Run("SGD")
    weight = run.model.get_parameter("last.weight")
    run.optimizer.state[weight] = {"past": [torch.zeros(2), {"at": torch.ones(())}], "n": 3, "pair": (1, torch.ones(1))}
    expected, state = run.contents(), train_state_of(run).capture()
    past_tensor = run.optimizer.state[weight]["past"][0]
    past_tensor.add_(5)
    run.optimizer.state[weight]["past"].append("more")
    run.optimizer.state[weight] |= {"n": 9, "new": torch.ones(1)}
    train_state_of(run).restore(state)
    assert same(expected, run.contents())
    assert run.optimizer.state[weight]["past"][0] is past_tensor


def test_added_removed_and_resized_buffers() -> None:
    model = nn.Module()
    for name in ("gone", "grown", "none"):
        model.register_buffer(name, torch.ones(2))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    run = TrainState(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    state = run.capture()
    del model.gone
    model.grown, model.none, model.cache = torch.zeros(3), None, torch.zeros(5)
    model.register_buffer("new", torch.ones(4))
    run.restore(state)
    assert {k: b.tolist() for k, b in model.named_buffers()} == {
        "gone": [1.0, 1.0],
        "grown": [1.0, 1.0],
        "none": [1.0, 1.0],
        "cache": [0.0] * 5,  # non-persistent: its size belongs to the module
        "new": [1.0] * 4,
    }


def test_restore_changes_nothing_if_a_parameter_does_not_match() -> None:
    run = Run()
    run.train(0)
    state = train_state_of(run).capture()
    run.train(1)
    run.model.get_submodule("last").register_parameter("weight", nn.Parameter(torch.ones(2, 8)))
    before = run.contents()
    with pytest.raises(RuntimeError, match=r"cannot restore the state: last\.weight changed"):
        train_state_of(run).restore(state)
    assert same(before, run.contents())


def test_param_group_added_after_the_capture_keeps_its_lr() -> None:
    run = Run()
    state = train_state_of(run).capture()
    new_param = nn.Parameter(torch.ones(2))
    run.optimizer.add_param_group({"params": [new_param], "lr": 0.5})
    new_param.sum().backward()
    run.optimizer.step()
    both = train_state_of(run).capture()
    run.optimizer.param_groups[1]["lr"] = 9.0
    train_state_of(run).restore(both)
    assert [g["lr"] for g in run.optimizer.param_groups] == [0.01, 0.5]
    train_state_of(run).restore(state)
    assert len(run.optimizer.param_groups) == 2
    assert not run.optimizer.state


class LossMeter:
    """A user object whose state_dict returns, and load_state_dict keeps, references."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": [1.0], "mean": torch.ones(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_extra_state_is_restored_repeatedly() -> None:
    run, meter, generator = Run(), LossMeter(), torch.Generator().manual_seed(3)
    average = torch.optim.swa_utils.AveragedModel(run.model)
    state = train_state_of(run, extra={"meter": meter, "generator": generator, "average": average}).capture()
    addresses = [p.data_ptr() for p in average.parameters()]
    expected = torch.rand(2, generator=generator)
    for _ in range(2):
        meter.seen["losses"].append(2.0)
        meter.seen["mean"].zero_()
        run.train(0)
        average.update_parameters(run.model)
        train_state_of(run, extra={"meter": meter, "generator": generator, "average": average}).restore(state)
        assert meter.seen["losses"] == [1.0]
        assert meter.seen["mean"].tolist() == [1.0, 1.0]
        assert torch.rand(2, generator=generator).equal(expected)
        assert int(average.n_averaged) == 0
        assert [p.data_ptr() for p in average.parameters()] == addresses


def test_extra_state_without_state_dict_is_refused() -> None:
    run = Run()
    with pytest.raises(
        TypeError, match=r"extra\['loader'\] must have state_dict and load_state_dict.*list has neither"
    ):
        train_state_of(run, extra={"loader": []})


def test_tensor_lr_is_restored_in_place() -> None:
    run = Run()
    lr = torch.tensor(0.25)
    run.optimizer.param_groups[0]["lr"] = lr
    state = train_state_of(run).capture()
    lr.fill_(3.0)
    train_state_of(run).restore(state)
    assert run.optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.25


def test_gradients_of_params_outside_the_model_are_dropped() -> None:
    outside_param = nn.Parameter(torch.ones(2))
    run = TrainState(nn.Linear(1, 1), torch.optim.SGD([outside_param]))
    state = run.capture()
    outside_param.sum().backward()
    run.restore(state)
    assert outside_param.grad is None

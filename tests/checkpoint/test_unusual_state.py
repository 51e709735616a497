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
from rewind_runs import Run, same, whole

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


def held(model: nn.Module) -> list[Tensor]:
    return [t for t in [*model.parameters(), *model.buffers()] if not isinstance(t, nn.UninitializedParameter)]


@torch.no_grad()
def spoil(model: Mixed) -> None:
    for t in held(model):
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
    only = nn.Parameter(torch.ones(2))
    run = TrainState(model, torch.optim.SGD([model.weight, model.brief, only], lr=0.1))
    state = run.capture()
    for _ in range(2):
        before = [t if t.is_meta else t.detach().clone() for t in held(model)]
        tensors = held(model)
        spoil(model)
        only.data.zero_()
        run.restore(state)
        assert all(map(operator.is_, held(model), tensors))
        assert all(a.is_meta or a.to_dense().equal(b.to_dense()) for a, b in zip(before, tensors, strict=True))
        assert only.tolist() == [1.0, 1.0]
        assert model.tied is model.weight
        assert model.graph._nnz() == 3
        run.capture(state)


def test_writing_back_is_not_seen_by_autograd() -> None:
    weight = nn.Parameter(torch.ones(3))
    model = nn.ParameterList([weight])
    run = TrainState(model, torch.optim.SGD(model.parameters()))
    state, version = run.capture(), weight._version
    run.restore(state)
    assert weight._version == version
    assert weight.requires_grad


def test_a_tensor_that_two_states_share_is_shared_again_and_one_of_two_is_not_mixed_up() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights)
    run = TrainState(nn.ParameterList(weights), optimizer)
    one = torch.tensor(1.0)
    optimizer.state[weights[0]], optimizer.state[weights[1]] = {"step": one}, {"step": one}
    shared = run.capture()
    optimizer.state[weights[1]] = {"step": torch.tensor(2.0)}
    apart = run.capture()
    optimizer.state[weights[1]]["step"] = one
    run.restore(apart)
    assert [float(optimizer.state[w]["step"]) for w in weights] == [1.0, 2.0]
    run.restore(shared)
    assert optimizer.state[weights[0]]["step"] is optimizer.state[weights[1]]["step"]


def test_nested_and_plain_optimizer_state_comes_back() -> None:
    run = Run("SGD")
    weight = run.model.get_parameter("last.weight")
    run.optimizer.state[weight] = {"past": [torch.zeros(2), {"at": torch.ones(())}], "n": 3, "pair": (1, torch.ones(1))}
    then, state = run.contents(), whole(run).capture()
    held = run.optimizer.state[weight]["past"][0]
    held.add_(5)
    run.optimizer.state[weight]["past"].append("more")
    run.optimizer.state[weight] |= {"n": 9, "new": torch.ones(1)}
    whole(run).restore(state)
    assert same(then, run.contents())
    assert run.optimizer.state[weight]["past"][0] is held


def test_buffers_that_came_went_or_grew() -> None:
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
        "cache": [0.0] * 5,  # the module's own counters know how long it is
        "new": [1.0] * 4,
    }


def test_nothing_is_touched_when_a_parameter_does_not_fit_any_more() -> None:
    run = Run()
    run.train(0)
    state = whole(run).capture()
    run.train(1)
    run.model.get_submodule("last").register_parameter("weight", nn.Parameter(torch.ones(2, 8)))
    before = run.contents()
    with pytest.raises(RuntimeError, match=r"cannot restore the state: last\.weight changed"):
        whole(run).restore(state)
    assert same(before, run.contents())


def test_a_group_added_since_stays_with_its_rate() -> None:
    run = Run()
    state = whole(run).capture()
    more = nn.Parameter(torch.ones(2))
    run.optimizer.add_param_group({"params": [more], "lr": 0.5})
    more.sum().backward()
    run.optimizer.step()
    both = whole(run).capture()
    run.optimizer.param_groups[1]["lr"] = 9.0
    whole(run).restore(both)
    assert [g["lr"] for g in run.optimizer.param_groups] == [0.01, 0.5]
    whole(run).restore(state)
    assert len(run.optimizer.param_groups) == 2
    assert not run.optimizer.state


class Meter:
    """Something of the loop's own that hands out its state by reference and takes it without copying."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": [1.0], "mean": torch.ones(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_extra_things_go_back_too_as_often_as_need_be() -> None:
    run, meter, generator = Run(), Meter(), torch.Generator().manual_seed(3)
    average = torch.optim.swa_utils.AveragedModel(run.model)
    state = whole(run, extra={"meter": meter, "generator": generator, "average": average}).capture()
    there = [p.data_ptr() for p in average.parameters()]
    expected = torch.rand(2, generator=generator)
    for _ in range(2):
        meter.seen["losses"].append(2.0)
        meter.seen["mean"].zero_()
        run.train(0)
        average.update_parameters(run.model)
        whole(run, extra={"meter": meter, "generator": generator, "average": average}).restore(state)
        assert meter.seen["losses"] == [1.0]
        assert meter.seen["mean"].tolist() == [1.0, 1.0]
        assert torch.rand(2, generator=generator).equal(expected)
        assert int(average.n_averaged) == 0
        assert [p.data_ptr() for p in average.parameters()] == there


def test_extra_things_without_state_are_turned_away() -> None:
    run = Run()
    with pytest.raises(
        TypeError, match=r"extra\['loader'\] must have state_dict and load_state_dict.*list has neither"
    ):
        whole(run, extra={"loader": []})


def test_a_rate_that_is_a_tensor() -> None:
    run = Run()
    rate = torch.tensor(0.25)
    run.optimizer.param_groups[0]["lr"] = rate
    state = whole(run).capture()
    rate.fill_(3.0)
    whole(run).restore(state)
    assert run.optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


def test_gradients_of_what_only_an_optimizer_holds_are_dropped_too() -> None:
    only = nn.Parameter(torch.ones(2))
    run = TrainState(nn.Linear(1, 1), torch.optim.SGD([only]))
    state = run.capture()
    only.sum().backward()
    run.restore(state)
    assert only.grad is None

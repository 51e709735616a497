"""Modules with state beyond parameters and buffers: `get_extra_state` and `set_extra_state`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from save_and_load import load, save
from torch import Tensor, nn

from surefoot.checkpoint.train_state import TrainState


class CallCounter(nn.Module):
    """Counts its calls and sums input means, outside of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean = 0, torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean + x.detach().mean(0)
        return x

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "mean": self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.mean = state["calls"], state["mean"].clone()


def run() -> tuple[nn.Sequential, TrainState]:
    model = nn.Sequential(nn.Linear(3, 3), CallCounter())
    return model, TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def counter(model: nn.Sequential) -> tuple[int, list[float]]:
    module = model[1]
    assert isinstance(module, CallCounter)
    return module.calls, module.mean.tolist()


def test_extra_state_is_restored_in_memory() -> None:
    model, train_state = run()
    model(torch.randn(4, 3))
    before, copy = counter(model), train_state.capture()
    model(torch.randn(4, 3))
    assert counter(model) != before
    train_state.restore(copy)
    assert counter(model) == before


def test_extra_state_is_loaded_under_another_wrapper(tmp_path: Path) -> None:
    model, train_state = run()
    model(torch.randn(4, 3))
    save(train_state, tmp_path)
    other, _ = run()
    wrapped = nn.DataParallel(other)
    notes = load(TrainState(wrapped, torch.optim.SGD(other.parameters(), lr=0.1)), tmp_path).notes
    assert counter(other) == counter(model)
    assert not [note for note in notes if "extra state" in note]


def test_extra_state_without_a_module_is_noted(tmp_path: Path) -> None:
    _, train_state = run()
    save(train_state, tmp_path)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    notes = load(TrainState(plain, torch.optim.SGD(plain.parameters(), lr=0.1)), tmp_path).notes
    assert [note for note in notes if "model.1 was saved, but no module takes it" in note]

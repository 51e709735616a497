"""Modules that keep more than parameters and buffers, the way torch lets them: `get_extra_state`, `set_extra_state`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from save_and_load import load, save
from torch import Tensor, nn

from surefoot.checkpoint.train_state import TrainState


class Counting(nn.Module):
    """Counts its calls, and remembers the mean of what it saw, outside of its buffers."""

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
    model = nn.Sequential(nn.Linear(3, 3), Counting())
    return model, TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def counter(model: nn.Sequential) -> tuple[int, list[float]]:
    found = model[1]
    assert isinstance(found, Counting)
    return found.calls, found.mean.tolist()


def test_it_goes_back_in_memory_with_the_run() -> None:
    model, whole = run()
    model(torch.randn(4, 3))
    before, copy = counter(model), whole.capture()
    model(torch.randn(4, 3))
    assert counter(model) != before
    whole.restore(copy)
    assert counter(model) == before


def test_it_comes_back_from_the_disk_also_under_another_wrapper(tmp_path: Path) -> None:
    model, whole = run()
    model(torch.randn(4, 3))
    save(whole, tmp_path)
    other, _ = run()
    wrapped = nn.DataParallel(other)
    notes = load(TrainState(wrapped, torch.optim.SGD(other.parameters(), lr=0.1)), tmp_path).notes
    assert counter(other) == counter(model)
    assert not [note for note in notes if "extra state" in note]


def test_a_model_that_has_none_any_more_says_so(tmp_path: Path) -> None:
    _, whole = run()
    save(whole, tmp_path)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    notes = load(TrainState(plain, torch.optim.SGD(plain.parameters(), lr=0.1)), tmp_path).notes
    assert [note for note in notes if "model.1 was saved, but no module takes it" in note]

"""With `step_fn` a guard runs the first refused step of an incident again and names its origin; training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot
from surefoot.data import make_loader
from surefoot.logs.diagnose_log import diagnose

BAD_STEP, STEPS = 12, 30


class Net(nn.Module):
    """A root in its middle: its derivative is infinite for a sample of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(9, 3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        size = (hidden * x.abs().sum(1, keepdim=True)).pow(2).sum(1, keepdim=True).sqrt()
        return self.last(torch.cat([self.dropout(hidden), size], dim=1))


def step_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for k in range(STEPS):
        x = torch.randn(8, 4, generator=generator)
        if k == BAD_STEP:
            x[5] = 0.0
        made.append((x, (x[:, 0] > 0).long()))
    return made


def train(run_dir: Path, *, step: Any = step_fn, **options: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, step_fn=step, **options)
    for batch in batches():
        loss = guard.watch(step_fn(model, batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return model, surefoot.read(run_dir).events


def origins(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e["evidence"]["origin"] for e in events if e["kind"] == "finding" and e["detector"] == "origin"]


def test_names_operation_and_sample_of_a_refused_step(tmp_path: Path) -> None:
    model, events = train(tmp_path / "with")
    (origin,) = origins(events)
    assert (origin["kind"], origin["operation"], origin["backward"]) == ("sqrt_at_zero", "sqrt", True)
    assert (origin["file"], origin["samples"]) == (__file__, [5])
    assert "sqrt" in origin["code"]
    assert origin["inputs"][0]["shape"] == [8, 1]
    json.dumps(origin, allow_nan=False)
    causes = [e for e in events if e["kind"] == "diagnosis"]
    assert causes[0]["cause"] == "log_of_zero"
    assert "sqrt" in causes[0]["detail"]
    # Looking for it changes nothing: the same run without step_fn ends with the same weights.
    plain, without = train(tmp_path / "without", step=None)
    assert not origins(without)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_diagnose_shows_the_origin(tmp_path: Path) -> None:
    train(tmp_path)
    shown = json.dumps(diagnose(tmp_path).as_json())
    assert "test_live.py" in shown
    assert "sample 5 of the batch" in shown


def test_an_error_inside_is_journaled(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("no such thing")

    _, events = train(tmp_path, step=broken)
    notes = [e["detail"] for e in events if e["kind"] == "note" and e.get("name") == "origin"]
    assert len(notes) == 1
    assert "no such thing" in notes[0]
    assert surefoot.read(tmp_path).scalars.rows == STEPS


def test_accumulation_and_loader(tmp_path: Path) -> None:
    """The micro-batch is named, and the sample by its number in the data set."""
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(2))
    order = [sample for batch in make_loader(list(range(96)), 4, seed=3) for sample in batch.tolist()]  # pyright: ignore[reportArgumentType]
    bad = order[42]  # in the second micro-batch of an update
    x[bad] = 0.0
    data = [(sample, (sample[0] > 0).long()) for sample in x]
    loader = make_loader(data, 4, seed=3)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = surefoot.attach(model, optimizer, run_dir=tmp_path, step_fn=step_fn, loader=loader)
    used: list[list[int]] = []
    for k, batch in enumerate(loader):
        used.append(loader.last_samples)
        guard.watch(step_fn(model, batch) / 2, batch).backward()
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    guard.close()
    place = next(k for k, samples in enumerate(used) if bad in samples)
    (origin,) = origins(surefoot.read(tmp_path).events)
    assert (origin["microbatch"], origin["num_microbatches"]) == (place % 2, 2)
    assert origin["samples"] == [used[place].index(bad)]
    assert origin["dataset_samples"] == [bad]
    assert "banned from here on" in origin["reason"]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "prefetch_factor": 3}, {"augment": lambda x, generator: x}])
def test_a_loader_tells_samples_of_earlier_batches(options: dict[str, Any]) -> None:
    """Also of an epoch before, and after a ban or a move."""
    loader = make_loader([*range(40)], 4, seed=1, **options)  # pyright: ignore[reportArgumentType]
    seen: list[list[int]] = []
    for _ in range(3):
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == 7:
                loader.ban(seen[-1][0])
            if len(seen) == 16:
                break
    loader.set_epoch(5)
    assert loader.num_fetched == len(seen)
    assert loader.samples_of(len(seen) + 1) == []
    assert [loader.samples_of(number) for number in range(1, len(seen) + 1)] == seen

"""The samples that make a batch non-finite or huge are named, and no others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot
from surefoot.checkpoint.rng import get_rng_states
from surefoot.origin.batch_rows import num_samples, only_samples
from surefoot.origin.locate import locate_large
from surefoot.origin_record import OriginKind


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def log_of_row(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Non-finite for a sample of zeros."""
    return model(batch["x"].abs().sum(1, keepdim=True).log()).mean()


def batch_of(size: int, zeros: list[int]) -> dict[str, Tensor]:
    x = torch.rand(size, 3) + 0.1
    x[zeros] = 0.0
    return {"x": x, "length": torch.tensor(3), "y": torch.arange(size)}


@pytest.mark.parametrize(("size", "culprits"), [(2, [1]), (8, [0]), (16, [3]), (16, [2, 9, 15]), (37, [36])])
def test_names_the_samples(size: int, culprits: list[int]) -> None:
    origin = surefoot.locate(nn.Linear(1, 1), batch_of(size, culprits), log_of_row)
    assert origin.kind is OriginKind.LOG_OF_ZERO
    assert list(origin.samples) == culprits
    assert origin.forwards - 1 <= 2 * math.ceil(math.log2(size))
    assert surefoot.locate(nn.Linear(1, 1), batch_of(size, culprits), log_of_row, samples=False).samples == ()


@pytest.mark.parametrize("culprit", [0, 5, 15])
def test_bisects_where_rows_are_mixed(culprit: int) -> None:
    """Batch norm spreads one sample's NaN over all of them."""

    def normed(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch.log1p().T.contiguous().flip(0).T).sigmoid().log().mean()

    batch = torch.rand(16, 4)
    batch[culprit] = -1.0
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    origin = surefoot.locate(model, batch, normed)
    assert origin.samples == (culprit,)
    assert origin.forwards - 1 <= 8


def test_blames_none_where_all_are_bad() -> None:
    model = nn.Linear(1, 1)
    assert surefoot.locate(model, batch_of(8, [*range(8)]), log_of_row).samples == ()
    origin = surefoot.locate(model, batch_of(8, []), lambda m, b: (m(b["x"].mean().reshape(1, 1)) * 0).log().sum())
    assert origin
    assert origin.samples == ()
    with torch.no_grad():
        model.bias.fill_(math.nan)
    assert surefoot.locate(model, batch_of(8, [2]), lambda m, b: m(b["x"][:, :1]).mean()).samples == ()


def test_in_backward() -> None:
    model = nn.Linear(3, 3)
    batch = torch.rand(8, 3) + 0.1
    batch[6] = 0.0

    def distance(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * x).pow(2).sum(1).sqrt().mean()

    origin = surefoot.locate(model, batch, distance)
    assert (origin.kind, origin.operation, origin.backward) == (OriginKind.SQRT_AT_ZERO, "sqrt", True)
    assert origin.samples == (6,)


def test_a_huge_sample() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x, y = torch.randn(16, 3), torch.randint(0, 2, (16,))
    x[11] *= 1e4

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), 1 - model(batch[0]).argmax(1).detach())

    state = get_rng_states(set())
    origin = locate_large(model, [(x, y)], step_fn, rng_states=state, max_norm=20.0, deadline=60.0)
    assert (origin.kind, origin.samples) == (OriginKind.LARGE_SAMPLE, (11,))
    assert origin.forwards <= 8


def test_parts_keep_shapes_and_containers() -> None:
    batch = {"x": torch.arange(6.0).reshape(3, 2), "y": (torch.arange(3), "text"), "names": ["a", "b", "c"], "n": 3}
    assert num_samples(batch) == 3
    part = only_samples(batch, [2, 0])
    assert part["x"].tolist() == [[0.0, 1.0], [0.0, 1.0], [4.0, 5.0]]
    assert part["y"][0].tolist() == [0, 0, 2]
    assert (part["y"][1], part["names"], part["n"]) == ("text", ["a", "a", "c"], 3)
    assert num_samples("nothing") == 0

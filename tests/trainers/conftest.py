"""One small task for every trainer: a regression whose batches can be spoilt, and what to look at afterwards."""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn

import surefoot

BATCH, BATCHES, SPOILT = 4, 12, 5


class Net(nn.Module):
    """Answers as models of transformers do, and has buffers that a bad batch can damage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": nn.functional.mse_loss(logits.float(), labels), "logits": logits}


class Task:
    """Batch `SPOILT` of `BATCHES` has one row of NaN when asked for."""

    batch = BATCH

    def net(self) -> Net:
        torch.manual_seed(0)
        return Net()

    def rows(self, *, spoilt: bool = False, without: Collection[int] = ()) -> list[dict[str, Tensor]]:
        """The rows of all batches but those in `without`."""
        draw = torch.Generator().manual_seed(1)
        rows = [
            {"x": torch.randn(16, generator=draw), "labels": torch.randn(4, generator=draw)}
            for _ in range(BATCH * BATCHES)
        ]
        if spoilt:
            rows[SPOILT * BATCH + 1]["x"].fill_(float("nan"))
        return [row for i, row in enumerate(rows) if i // BATCH not in without]

    def batches(self, *, spoilt: bool = False, without: Collection[int] = ()) -> list[dict[str, Tensor]]:
        rows = self.rows(spoilt=spoilt, without=without)
        groups = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        return [{k: torch.stack([row[k] for row in group]) for k in group[0]} for group in groups]

    def update(self, accumulate: int) -> int:
        """The update that the spoilt batch is part of."""
        return SPOILT // accumulate

    def partners(self, accumulate: int) -> range:
        """The batches of that update."""
        first = self.update(accumulate) * accumulate
        return range(first, first + accumulate)

    def verdicts(self, run_dir: str | os.PathLike[str]) -> list[int]:
        run = surefoot.read(run_dir)
        assert not [e for e in run.events if e.get("name") == "degraded"]
        return run.scalars["verdict"].tolist()

    def same(self, a: nn.Module, b: nn.Module) -> bool:
        """Whether weights and buffers are equal to the last bit."""
        one, other = a.state_dict(), b.state_dict()
        return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)

    def finite(self, net: nn.Module) -> bool:
        return all(bool(t.isfinite().all()) for t in net.state_dict().values())


@pytest.fixture
def task() -> Task:
    return Task()

"""One small regression task for every trainer, optionally with a NaN batch, and checks of the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import surefoot

sys.path.insert(0, str(Path(__file__).parent))
BATCH, BATCHES, BAD_BATCH = 4, 12, 5


class Net(nn.Module):
    """Returns a dict like models of transformers, and has buffers that a bad batch can damage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": nn.functional.mse_loss(logits.float(), labels), "logits": logits}


class Task:
    """Regression data; with `bad_batch`, batch `BAD_BATCH` has one row of NaN."""

    batch = BATCH

    def net(self) -> Net:
        torch.manual_seed(0)
        return Net()

    def rows(self, *, bad_batch: bool = False, without: Collection[int] = ()) -> list[dict[str, Tensor]]:
        """The rows of all batches except those in `without`."""
        generator = torch.Generator().manual_seed(1)
        rows = [
            {"x": torch.randn(16, generator=generator), "labels": torch.randn(4, generator=generator)}
            for _ in range(BATCH * BATCHES)
        ]
        if bad_batch:
            rows[BAD_BATCH * BATCH + 1]["x"].fill_(float("nan"))
        return [row for i, row in enumerate(rows) if i // BATCH not in without]

    def batches(self, *, bad_batch: bool = False, without: Collection[int] = ()) -> list[dict[str, Tensor]]:
        rows = self.rows(bad_batch=bad_batch, without=without)
        groups = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        return [{k: torch.stack([row[k] for row in group]) for k in group[0]} for group in groups]

    def bad_update(self, accumulate: int) -> int:
        """The update that contains the bad batch."""
        return BAD_BATCH // accumulate

    def batches_of_bad_update(self, accumulate: int) -> range:
        """The batches of that update."""
        first = self.bad_update(accumulate) * accumulate
        return range(first, first + accumulate)

    def verdicts(self, run_dir: str | os.PathLike[str]) -> list[int]:
        run = surefoot.read(run_dir)
        assert not [e for e in run.events if e.get("name") == "degraded"]
        return run.scalars["verdict"].tolist()

    def same(self, a: nn.Module, b: nn.Module) -> bool:
        """Whether weights and buffers are bit-identical."""
        state, other_state = a.state_dict(), b.state_dict()
        return state.keys() == other_state.keys() and all(torch.equal(state[k], other_state[k]) for k in state)

    def finite(self, net: nn.Module) -> bool:
        return all(bool(t.isfinite().all()) for t in net.state_dict().values())


@pytest.fixture
def task() -> Task:
    return Task()

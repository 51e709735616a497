"""The gate, for every optimizer: after a refusal weights, optimizer state and buffers are bit-identical to before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import surefoot

sys.path.insert(0, str(Path(__file__).parent))
import optimizer_matrix

WARMUP = optimizer_matrix.WARMUP


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(("name", "mode", "fault", "when"), list(optimizer_matrix.cells()))
def test_refused_step_leaves_no_trace(name: str, mode: str, fault: str, when: str, tmp_path: Path) -> None:
    optimizer_matrix.refused_step_leaves_no_trace(name, mode, fault, when, run_dir=tmp_path, device="cpu")


@pytest.mark.parametrize("fault", optimizer_matrix.FAULTS)
@pytest.mark.parametrize("fused", [True, False])
def test_two_optimizers_on_one_model_refuse_together(fused: bool, fault: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = optimizer_matrix.Dense()
    first = torch.optim.AdamW(model.first.parameters(), fused=fused)
    last = torch.optim.SGD(model.last.parameters(), lr=0.01, momentum=0.9, fused=fused)
    guard = surefoot.attach(model, [first, last], run_dir=tmp_path, policy=surefoot.Policy(warmup=WARMUP - 1))

    def train(i: int, fault: str | None = None) -> None:
        x, y, _ = optimizer_matrix.batch(i)
        loss = guard.watch((model(x) - y).square().mean(), x)
        first.zero_grad()
        last.zero_grad()
        if fault:  # only the parameters of the second optimizer are hit
            worse = float("nan") if fault == "nan" else 1e6
            handle = model.last.weight.register_hook(lambda g: g * worse)
            loss.backward()
            handle.remove()
        else:
            loss.backward()
        first.step()
        last.step()

    for i in range(WARMUP):
        train(i)
    before = optimizer_matrix.snapshot(model, first, last)
    train(WARMUP, fault)
    assert optimizer_matrix.same(before["optimizers"], optimizer_matrix.snapshot(model, first, last)["optimizers"])
    assert optimizer_matrix.same(before["model"], optimizer_matrix.snapshot(model, first, last)["model"])
    train(WARMUP + 1)
    guard.close()
    scalars = surefoot.read(tmp_path).scalars
    refused = scalars["attempt"][scalars["verdict"] != 0]
    assert refused.tolist() == [WARMUP, WARMUP]
    assert guard.step == WARMUP + 1

"""The gate on CUDA: the same matrix, and no more host syncs than the bare loop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import surefoot
from benchmarks.host_syncs import count_host_syncs
from surefoot.models.decoder import SIZES, Decoder, next_token_loss

sys.path.insert(0, str(Path(__file__).parent))
import optimizer_matrix

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("mode", optimizer_matrix.MODES)
def test_refused_step_leaves_no_trace(mode: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    for name, cell_mode, fault, when in optimizer_matrix.cells():
        if cell_mode != mode or (name == "Adagrad" and "fused" in mode):  # torch has no fused Adagrad on CUDA
            continue
        if "compiled" in mode and name not in ("AdamW", "SGD", "NAdam"):  # compiling takes long; the hooks are the same
            continue
        run_dir = tmp_path / f"{name}-{fault}-{when}"
        optimizer_matrix.refused_step_leaves_no_trace(
            name, mode, fault, when, run_dir=run_dir, device="cuda", backend="inductor"
        )


@pytest.mark.parametrize("clip", [None, 1.0])
def test_no_more_host_syncs_than_the_bare_loop(clip: float | None, tmp_path: Path) -> None:
    model = Decoder(SIZES["tiny"]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randint(0, 256, (4, 65), device="cuda")

    def bare() -> None:
        next_token_loss(model, batch).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    def attached() -> None:
        guard.watch(next_token_loss(model, batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        bare()
    before = count_host_syncs(bare, steps=20)
    guard = surefoot.attach(model, optimizer, run_dir=tmp_path, clip=clip)
    for _ in range(5):
        attached()
    assert count_host_syncs(attached, steps=20) <= before
    guard.close()


def test_buffers_of_a_refused_batch_are_restored_on_the_device(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[m for _ in range(30) for m in (torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))]
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    guard = surefoot.attach(model, optimizer, run_dir=tmp_path)
    for i in range(12):
        x = torch.randn(16, 8, device="cuda")
        if i == 8:
            before = {k: v.clone() for k, v in model.state_dict().items()}
            x[0, 0] = float("nan")
        guard.watch(model(x).square().mean(), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if i == 8:
            assert optimizer_matrix.same(before, dict(model.state_dict()))
    guard.close()
    assert all(bool(v.isfinite().all()) for v in model.state_dict().values())

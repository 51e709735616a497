"""Run by torchrun with two ranks: trains under DDP, FSDP2 and a sharded optimizer with a fault on rank 1 only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import optimizer_matrix
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import surefoot
from surefoot.measure.grad_stats import GradStats
from surefoot.measure.layout import layout_params
from surefoot.measure.stats_torch import TorchStats

WARMUP = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm1d(6, affine=False), nn.Linear(6, 9), nn.Tanh(), nn.BatchNorm1d(9), nn.Linear(9, 7)
        )
        self.last = nn.Linear(7, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(x)))


def prepare(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Net()
    if kind.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused="fused" in kind)


def local_copy(state: Any) -> Any:
    if isinstance(state, DTensor):
        return state.to_local().clone()
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: local_copy(v) for k, v in state.items()}
    return [local_copy(v) for v in state] if isinstance(state, list | tuple) else state


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return local_copy({"model": model.state_dict(), "state": [dict(s) for s in inner.state.values()]})


def reference_norm(model: nn.Module) -> float:
    squares = torch.zeros(())
    for p in model.parameters():
        g = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        squares = squares + g.double().square().sum()
    return float(squares.sqrt())


def trial(kind: str, fault: str, run_dir: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    model, optimizer = prepare(kind)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, policy=surefoot.Policy(warmup=WARMUP - 1))
    norms: list[float] = []

    def train(i: int, batch_fault: str | None) -> None:
        x, y, factor = optimizer_matrix.batch(2 * i + rank, batch_fault if rank == 1 else None)
        loss = guard.watch((model(x) - y).square().mean() * factor, x)
        loss.backward()
        norms.append(reference_norm(model))
        optimizer.step()
        optimizer.zero_grad()

    for i in range(WARMUP):
        train(i, None)
    before = snapshot(model, optimizer)
    train(WARMUP, fault)
    unchanged = optimizer_matrix.same(before, snapshot(model, optimizer))
    train(WARMUP + 1, None)
    applied = not optimizer_matrix.same(before["model"], snapshot(model, optimizer)["model"])
    guard.close()
    dist.barrier()
    run = surefoot.read(run_dir)
    return {
        "kind": kind,
        "fault": fault,
        "unchanged": unchanged,
        "applied": applied,
        "steps": guard.step,
        "verdicts": run.scalars["verdict"].tolist(),
        "refusals": [e["reason"].replace("module.", "") for e in run.events if e.get("action") == "refuse"],
        "named": run.scalars["rank"].tolist(),
        "norms": norms,
        "measured": run.scalars["norm"].tolist(),
        "veto_methods": run.info["config"]["optimizers"][0]["way"],
    }


def placements() -> dict[str, float]:
    """Largest difference of DTensor gradient statistics to those of the full tensor, for every placement."""
    mesh = init_device_mesh("cpu", (2,))
    kinds: dict[str, Placement] = {
        "rows": Shard(0),
        "columns": Shard(1),
        "replicate": Replicate(),
        "partial": Partial(),
    }
    worst: dict[str, float] = {}
    for name, kind in kinds.items():
        torch.manual_seed(1)
        gradient = torch.randn(5, 3) * 1e-4 + 1e-5
        gradient[0, 0] = 0.0
        param_placements = [Replicate() if isinstance(kind, Partial) else kind]
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.randn(5, 3), mesh, param_placements))
        model.plain = nn.Parameter(torch.ones(4))
        model.plain.grad = torch.arange(4.0)
        local_grad = gradient * (0.25 if dist.get_rank() == 0 else 0.75)
        model.weight.grad = (
            DTensor.from_local(local_grad, mesh, [kind])
            if isinstance(kind, Partial)
            else distribute_tensor(gradient, mesh, param_placements)
        )
        layout = layout_params(model, [torch.optim.SGD(model.parameters())])
        meter = GradStats(layout, [slice(0, 2)], torch.device("cpu"))
        meter.measure(torch.tensor(1.0), scale=None)
        totals = meter.gather_totals()
        expected = torch.empty(2, 8)
        full_grads = {"weight": gradient, "plain": model.plain.grad}
        TorchStats(layout.numels, torch.device("cpu")).measure([full_grads[n] for n in layout.names], out=expected)
        norm = expected[:, 0].square().sum()
        worst[name] = float(torch.maximum((meter.block.stats - expected).abs().max(), (totals[-2] - norm).abs()))
    return worst


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [
        trial(kind, fault, out / f"{kind}-{fault}")
        for kind in ("ddp", "ddp fused", "fsdp2", "fsdp2 fused", "zero")
        for fault in (*optimizer_matrix.FAULTS, optimizer_matrix.BUFFER)
    ]
    results.append(placements())
    (out / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

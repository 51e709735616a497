"""Run with two or four ranks: saves runs sharded in every way, and loads them in every other."""

from __future__ import annotations

import json
import logging
import random
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from save_and_load import hashed, load, save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from surefoot.checkpoint.format import pieces
from surefoot.checkpoint.format.rank_files import CheckpointMismatch, check_complete
from surefoot.checkpoint.train_state import TrainState

TWO = ("ddp", "fsdp2", "zero")
FOUR = ("hsdp", "fsdp2 x tp")
pieces.SPLIT_BYTES = 100  # so that small tensors are shared out as large ones are


class Count:
    """Something of a process's own."""

    def __init__(self, n: int) -> None:
        self.state: dict[str, Any] = {"n": n, "t": torch.full((3,), n)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Net(nn.Module):
    """Sizes that no number of processes divides, and a weight that is smaller than any."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width) if width % 2 else nn.Identity()
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 1 if width % 2 else 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


class Run:
    def __init__(self, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.kind, self.part = kind, dist.get_rank() // (2 if "tp" in kind else 1)
        self.model: Any = _spread(kind, Net(10 if "tp" in kind else 9))
        if kind == "zero":
            self.optimizer: Any = ZeroRedundancyOptimizer(
                self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
            )
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.own = Count(seed + dist.get_rank())
        for sow in (torch.manual_seed, random.seed, np.random.seed):
            sow(100 * seed + self.part)

    @property
    def whole(self) -> TrainState:
        return TrainState(self.model, self.optimizer, scheduler=self.scheduler, extra={"own": self.own})

    def train(self, i: int) -> float:
        alone = self.kind in ("one", "one x tp", "by hand")
        g = torch.Generator().manual_seed(i if alone else 10 * i + self.part)
        x = torch.randn(8, 6, generator=g) + random.random() * 0.01
        loss = (self.model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        """Whole parameters, and for those of an optimizer everything it keeps beside them."""
        found = {}
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        for name, p in self.model.named_parameters():
            name = name.removeprefix("module.")
            found[name] = full(p)
            for key, value in optimizer.state.get(p, {}).items():
                found[f"{name}.{key}"] = full(value)
        return found

    def gathered(self) -> dict[str, Tensor]:
        """The same, with what only other processes keep."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.weights())
        return {name: value for part in parts for name, value in part.items()}


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _spread(kind: str, model: Net) -> nn.Module:
    if kind in ("ddp", "zero"):
        return DistributedDataParallel(model, broadcast_buffers=False)
    if kind in ("one", "one x tp", "by hand"):
        return model
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if kind == "fsdp2 x tp":
        parallelize_module(model, mesh["inner"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
        mesh = mesh["outer"]
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def here() -> dict[str, int]:
    return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def goes_on(kind: str, folder: Path) -> tuple[dict[str, bool], dict[str, Tensor]]:
    """Saved and loaded by as many processes, each of which is where it was; and the whole state that was saved."""
    run = Run(kind)
    for i in range(3):
        run.train(i)
    whole = run.whole
    left = save(whole, folder / kind, **here()).left_out
    dist.barrier()
    check_complete(folder / kind)
    before, then = hashed(whole, live=False), run.gathered()
    if dist.get_rank() == 0:
        named = {name.removeprefix("module.") for name, _ in run.model.named_parameters()}
        save_file({name: t for name, t in then.items() if name in named}, folder / f"{kind}.safetensors")
    losses = [run.train(i) for i in (3, 4)]
    drawn = draws()
    resumed = Run(kind, seed=5)
    resumed.train(50)
    other = resumed.whole
    dist.barrier()
    restored = load(other, folder / kind, **here())
    told = {"hash": hashed(other) == before, "no notes": not restored.notes, "whole": not left}
    told["loaded"] = equal(then, resumed.gathered())
    told["own"] = resumed.own.state["n"] == dist.get_rank() and resumed.own.state["t"].tolist() == [dist.get_rank()] * 3
    told["losses"] = [resumed.train(i) for i in (3, 4)] == losses
    told["end"] = equal(run.gathered(), resumed.gathered())
    told["buffers"] = all(map(torch.equal, run.model.buffers(), resumed.model.buffers()))
    told["random"] = draws() == drawn
    return told, then


def crosses(kinds: tuple[str, ...], folder: Path, states: dict[str, dict[str, Tensor]]) -> dict[str, bool]:
    """What was saved one way is loaded in every other, and by one process."""
    told = {}
    for then in kinds:
        for now in kinds:
            run = Run(now, seed=7)
            load(run.whole, folder / then, **here())
            told[f"{then} to {now}"] = equal(states[then], run.gathered())
            run.train(3)
        one = Run("one x tp" if "tp" in then else "one", seed=8)
        notes = load(one.whole, folder / then).notes
        told[f"{then} to one"] = equal(states[then], one.weights()) and len(notes) == 1
    return told


def from_one(kinds: tuple[str, ...], folder: Path) -> dict[str, bool]:
    """What one process saved is loaded by several."""
    one = Run("one x tp" if "tp" in kinds[0] else "one")
    for i in range(3):
        one.train(i)
    if dist.get_rank() == 0:
        save(one.whole, folder / one.kind)
    dist.barrier()
    told = {}
    state: list[Any] = [one.weights(), [b.clone() for b in one.model.buffers()]]
    dist.broadcast_object_list(state, 0)
    for kind in kinds:
        run = Run(kind, seed=7)
        before = draws()
        run = Run(kind, seed=7)
        notes = load(run.whole, folder / one.kind, **here()).notes
        told[f"one to {kind}"] = equal(state[0], run.gathered()) and len(notes) == 1
        told[f"one to {kind}: buffers"] = all(map(torch.equal, state[1], run.model.buffers()))
        told[f"one to {kind}: random"] = (draws() == before) == (dist.get_rank() > 0)
        run.train(3)
    return told


def by_hand(folder: Path) -> dict[str, bool]:
    """Weights that nothing spreads: each process may have its own, and then no other number of them can go on."""
    told = {}
    for name, seed in (("alike", 0), ("apart", dist.get_rank())):
        run = Run("by hand", seed=seed)
        torch.manual_seed(0)
        random.seed(0)
        run.train(0)
        save(run.whole, folder / name, **here())
        dist.barrier()
        other = Run("by hand", seed=9)
        load(other.whole, folder / name, **here())
        told[f"{name} to two"] = equal(run.weights(), other.weights())
        one = Run("one", seed=9)
        before = hashed(one.whole)
        try:
            load(one.whole, folder / name)
            told[f"{name} to one"] = name == "alike" and (dist.get_rank() > 0 or equal(run.weights(), one.weights()))
        except CheckpointMismatch as misfit:
            right = "its own values" in str(misfit) and "Load it with 2 ranks" in str(misfit)
            told[f"{name} to one"] = name == "apart" and right and hashed(one.whole) == before
        dist.barrier()
    return told


def main(rank: int, world_size: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    kinds = TWO if world_size == 2 else FOUR
    told: dict[str, Any] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for kind in kinds:
        told[kind], states[kind] = goes_on(kind, folder)
        dist.barrier()
    told["crosses"] = crosses(tuple(k for k in kinds if "tp" not in k), folder, states)
    told["crosses"] |= crosses(tuple(k for k in kinds if "tp" in k), folder, states)
    told["from one"] = from_one(kinds, folder) if world_size == 2 else from_one(kinds[:1], folder)
    told["from one"] |= from_one(kinds[1:], folder) if world_size == 4 else {}
    if world_size == 2:
        told["by hand"] = by_hand(folder)
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    # Forked, so that torch is imported once.
    size = int(sys.argv[2])
    mp.start_processes(main, (size, Path(sys.argv[1]), free_port()), nprocs=size, start_method="fork")

"""Run with two or four ranks: saves runs under each kind of parallelism and loads them under every other."""

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
pieces.SPLIT_BYTES = 100  # split small tensors among ranks as large ones are


class Count:
    """State that differs between ranks."""

    def __init__(self, n: int) -> None:
        self.state: dict[str, Any] = {"n": n, "t": torch.full((3,), n)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Net(nn.Module):
    """Sizes that no world size divides, and one weight with fewer rows than ranks."""

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
        self.model: Any = shard_model(kind, Net(10 if "tp" in kind else 9))
        if kind == "zero":
            self.optimizer: Any = ZeroRedundancyOptimizer(
                self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
            )
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.own = Count(seed + dist.get_rank())
        for seed_rng in (torch.manual_seed, random.seed, np.random.seed):
            seed_rng(100 * seed + self.part)

    @property
    def train_state(self) -> TrainState:
        return TrainState(self.model, self.optimizer, scheduler=self.scheduler, extra={"own": self.own})

    def train(self, i: int) -> float:
        single = self.kind in ("one", "one x tp", "by hand")
        g = torch.Generator().manual_seed(i if single else 10 * i + self.part)
        x = torch.randn(8, 6, generator=g) + random.random() * 0.01
        loss = (self.model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        """Full parameters with their optimizer state."""
        tensors = {}
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        for name, p in self.model.named_parameters():
            name = name.removeprefix("module.")
            tensors[name] = full_tensor(p)
            for key, value in optimizer.state.get(p, {}).items():
                tensors[f"{name}.{key}"] = full_tensor(value)
        return tensors

    def gathered(self) -> dict[str, Tensor]:
        """`weights` of all ranks merged."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.weights())
        return {name: value for part in parts for name, value in part.items()}


def full_tensor(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def shard_model(kind: str, model: Net) -> nn.Module:
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


def rank_options() -> dict[str, int]:
    return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def resume_same_world_size(kind: str, folder: Path) -> tuple[dict[str, bool], dict[str, Tensor]]:
    """Save and load with the same world size and check that every rank resumes; also return the full saved state."""
    run = Run(kind)
    for i in range(3):
        run.train(i)
    train_state = run.train_state
    left = save(train_state, folder / kind, **rank_options()).left_out
    dist.barrier()
    check_complete(folder / kind)
    before, saved_state = hashed(train_state, live=False), run.gathered()
    if dist.get_rank() == 0:
        named = {name.removeprefix("module.") for name, _ in run.model.named_parameters()}
        save_file({name: t for name, t in saved_state.items() if name in named}, folder / f"{kind}.safetensors")
    losses = [run.train(i) for i in (3, 4)]
    drawn = draws()
    resumed = Run(kind, seed=5)
    resumed.train(50)
    other_state = resumed.train_state
    dist.barrier()
    restored = load(other_state, folder / kind, **rank_options())
    results = {"hash": hashed(other_state) == before, "no notes": not restored.notes, "complete": not left}
    results["loaded"] = equal(saved_state, resumed.gathered())
    results["own"] = (
        resumed.own.state["n"] == dist.get_rank() and resumed.own.state["t"].tolist() == [dist.get_rank()] * 3
    )
    results["losses"] = [resumed.train(i) for i in (3, 4)] == losses
    results["end"] = equal(run.gathered(), resumed.gathered())
    results["buffers"] = all(map(torch.equal, run.model.buffers(), resumed.model.buffers()))
    results["random"] = draws() == drawn
    return results, saved_state


def load_across_kinds(kinds: tuple[str, ...], folder: Path, states: dict[str, dict[str, Tensor]]) -> dict[str, bool]:
    """Load what each kind saved under every other kind and with one rank."""
    results = {}
    for saved_kind in kinds:
        for loaded_kind in kinds:
            run = Run(loaded_kind, seed=7)
            load(run.train_state, folder / saved_kind, **rank_options())
            results[f"{saved_kind} to {loaded_kind}"] = equal(states[saved_kind], run.gathered())
            run.train(3)
        single_run = Run("one x tp" if "tp" in saved_kind else "one", seed=8)
        notes = load(single_run.train_state, folder / saved_kind).notes
        results[f"{saved_kind} to one"] = equal(states[saved_kind], single_run.weights()) and len(notes) == 1
    return results


def load_from_one_rank(kinds: tuple[str, ...], folder: Path) -> dict[str, bool]:
    """Load what one rank saved with several ranks."""
    single_run = Run("one x tp" if "tp" in kinds[0] else "one")
    for i in range(3):
        single_run.train(i)
    if dist.get_rank() == 0:
        save(single_run.train_state, folder / single_run.kind)
    dist.barrier()
    results = {}
    state: list[Any] = [single_run.weights(), [b.clone() for b in single_run.model.buffers()]]
    dist.broadcast_object_list(state, 0)
    for kind in kinds:
        run = Run(kind, seed=7)
        before = draws()
        run = Run(kind, seed=7)
        notes = load(run.train_state, folder / single_run.kind, **rank_options()).notes
        results[f"one to {kind}"] = equal(state[0], run.gathered()) and len(notes) == 1
        results[f"one to {kind}: buffers"] = all(map(torch.equal, state[1], run.model.buffers()))
        results[f"one to {kind}: random"] = (draws() == before) == (dist.get_rank() > 0)
        run.train(3)
    return results


def unsharded_ranks(folder: Path) -> dict[str, bool]:
    """Unsharded weights without DDP: when ranks differ, no other world size can load them."""
    results = {}
    for name, seed in (("alike", 0), ("apart", dist.get_rank())):
        run = Run("by hand", seed=seed)
        torch.manual_seed(0)
        random.seed(0)
        run.train(0)
        save(run.train_state, folder / name, **rank_options())
        dist.barrier()
        other = Run("by hand", seed=9)
        load(other.train_state, folder / name, **rank_options())
        results[f"{name} to two"] = equal(run.weights(), other.weights())
        single_run = Run("one", seed=9)
        before = hashed(single_run.train_state)
        try:
            load(single_run.train_state, folder / name)
            results[f"{name} to one"] = name == "alike" and (
                dist.get_rank() > 0 or equal(run.weights(), single_run.weights())
            )
        except CheckpointMismatch as mismatch:
            explained = "its own values" in str(mismatch) and "Load it with 2 ranks" in str(mismatch)
            results[f"{name} to one"] = name == "apart" and explained and hashed(single_run.train_state) == before
        dist.barrier()
    return results


def main(rank: int, world_size: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    kinds = TWO if world_size == 2 else FOUR
    results: dict[str, Any] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for kind in kinds:
        results[kind], states[kind] = resume_same_world_size(kind, folder)
        dist.barrier()
    results["crosses"] = load_across_kinds(tuple(k for k in kinds if "tp" not in k), folder, states)
    results["crosses"] |= load_across_kinds(tuple(k for k in kinds if "tp" in k), folder, states)
    results["from one"] = (
        load_from_one_rank(kinds, folder) if world_size == 2 else load_from_one_rank(kinds[:1], folder)
    )
    results["from one"] |= load_from_one_rank(kinds[1:], folder) if world_size == 4 else {}
    if world_size == 2:
        results["by hand"] = unsharded_ranks(folder)
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
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

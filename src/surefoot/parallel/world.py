"""How the processes of a run meet and part: torchrun's environment read, or one process on its own."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from surefoot.parallel.meeting import open_store

log = logging.getLogger("surefoot")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_PATIENCE = 20.0
"""Seconds that parting may take: a process that is gone cannot say goodbye."""
_LAUNCH = "Start it with torchrun (see examples/launch), which sets all of them"


class ParallelError(ValueError):
    """The processes cannot work together as they were asked to; the message says what to change."""


@dataclass(frozen=True, slots=True)
class World:
    """Which of how many processes this is, and the device it works on."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks for all."""
        return self.rank == 0


def init_distributed(device: str = "auto", timeout: float = 600.0) -> World:
    """Join the processes that torchrun started, or be alone; `device` is auto, cpu or cuda.

    A process that does not answer the others for `timeout` seconds is given up, and they fail with it.
    """
    rank, size, local = _numbers(os.environ)
    world = World(rank, size, local, _device(device, local))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if size > 1:
        init_process_group(world, timeout)
    return world


def init_process_group(world: World, timeout: float) -> None:
    """Form the process group: gloo between hosts' memories, NCCL between GPUs."""
    cuda = world.device.type == "cuda"
    if not dist.is_available() or (cuda and not dist.is_nccl_available()):
        missing = "NCCL" if dist.is_available() else "torch.distributed"
        raise ParallelError(
            f"{world.size} processes were started, but this build of torch has no {missing}. Install one that has it, "
            "or start one process."
        )
    patience = timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=open_store(world.rank, world.size, patience),
            rank=world.rank,
            world_size=world.size,
            timeout=patience,
            device_id=world.device if cuda else None,
        )
    except (RuntimeError, ValueError, OSError) as error:  # torch's own errors of the store are RuntimeErrors
        where = ":".join(os.environ.get(name, "?") for name in _ADDRESS)
        raise ParallelError(
            f"rank {world.rank} of {world.size} did not meet the others at {where} (given {timeout:g} s): "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. Check that this address can be "
            "reached from every host, that all processes were started, and that no other run uses the port."
        ) from error


def shutdown(world: World, *, failed: bool = False) -> None:
    """Part from the others; after a failure without waiting for them, since they may be gone."""
    if world.size == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    if not failed:
        with contextlib.suppress(RuntimeError):  # whoever left early has had its reasons, and has said so
            dist.all_reduce(torch.zeros(1))
    parting = threading.Thread(target=_part, args=(failed,), name="surefoot-part", daemon=True)
    parting.start()
    parting.join(_PATIENCE)
    if parting.is_alive():
        log.warning("surefoot: rank %d left without goodbye: the others do not answer", world.rank)


def _part(failed: bool) -> None:
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if failed and abort is not None:
        with contextlib.suppress(Exception):  # breaks off what the GPUs still wait for; gloo need not be told
            abort()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _numbers(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of processes and rank on this host, as torchrun tells them."""
    told = {name: environment[name] for name in RANK_VARIABLES if environment.get(name)}
    if not told:
        return 0, 1, 0
    numbers = [name for name in RANK_VARIABLES if name not in told]
    alone = told.get("WORLD_SIZE") == "1"
    missing = numbers if alone else [*numbers, *(name for name in _ADDRESS if not environment.get(name))]
    if missing:
        raise ParallelError(
            f"the environment says {_listed(told)} but not {', '.join(missing)}, so the processes cannot find each "
            f"other. {_LAUNCH}; or unset {', '.join(told)} to train with one process."
        )
    try:
        rank, size, local = (int(told[name]) for name in RANK_VARIABLES)
    except ValueError:
        raise ParallelError(f"these must be whole numbers: {_listed(told)}. {_LAUNCH}.") from None
    if not (size >= 1 and 0 <= rank < size and 0 <= local < size):
        raise ParallelError(f"{_listed(told)} do not fit together: ranks go from 0 to WORLD_SIZE - 1. {_LAUNCH}.")
    return rank, size, local


def _listed(told: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in told.items())


def _device(asked: str, local: int) -> torch.device:
    """The device of this process: the GPU with its number on this host, or the CPU."""
    if asked not in ("auto", "cpu", "cuda"):
        raise ParallelError(f"device is auto, cpu or cuda; got {asked!r}")
    found = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and not found):
        return torch.device("cpu")
    if not found:
        raise ParallelError(
            "device is cuda, but torch sees no GPU here: check the driver with nvidia-smi and torch.version.cuda, or "
            "set device=cpu."
        )
    if local >= found:
        raise ParallelError(
            f"process {local} of this host (LOCAL_RANK={local}) needs a GPU of its own, but only {found} can be seen: "
            f"start {found} processes on this host (--nproc-per-node {found}), let CUDA_VISIBLE_DEVICES show all of "
            "them to every process, or set device=cpu."
        )
    return torch.device("cuda", local)

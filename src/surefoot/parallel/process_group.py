"""Joins the processes that torchrun started into a process group, or runs as a single process."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("surefoot")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_SHUTDOWN_SECONDS = 20.0
"""How long leaving the process group may take: other ranks may be gone and never answer."""
_LAUNCH_HINT = "Start it with torchrun (see examples/launch), which sets all of them"
_POLL_SECONDS = 0.02
_REQUESTS_KEY = "surefoot/requests"

T = TypeVar("T")
N = TypeVar("N", int, float)


class ParallelError(ValueError):
    """The processes cannot train together as configured; the message says what to change."""


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process, the number of processes, and the device of this process."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0


def init_distributed(device: str = "auto", timeout: float = 600.0) -> World:
    """Join the processes that torchrun started, or run alone; `device` is auto, cpu or cuda.

    When a rank does not answer for `timeout` seconds, the collective operations of all ranks fail.
    """
    rank, size, local_rank = _read_ranks(os.environ)
    world = World(rank, size, local_rank, _choose_device(device, local_rank))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if size > 1:
        init_process_group(world, timeout)
    return world


def init_process_group(world: World, timeout: float) -> None:
    """Create the process group: gloo for CPU tensors, NCCL for GPU tensors."""
    cuda = world.device.type == "cuda"
    if not dist.is_available() or (cuda and not dist.is_nccl_available()):
        missing = "NCCL" if dist.is_available() else "torch.distributed"
        raise ParallelError(
            f"{world.size} processes were started, but this build of torch has no {missing}. Install one that has it, "
            "or start one process."
        )
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=_open_store(world.rank, world.size, limit),
            rank=world.rank,
            world_size=world.size,
            timeout=limit,
            device_id=world.device if cuda else None,
        )
    except (RuntimeError, ValueError, OSError) as error:  # torch's store errors are RuntimeErrors
        address = ":".join(os.environ.get(name, "?") for name in _ADDRESS_VARIABLES)
        raise ParallelError(
            f"rank {world.rank} of {world.size} could not join the other ranks at {address} within {timeout:g} s: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. Check that this address can be "
            "reached from every host, that all processes were started, and that no other run uses the port."
        ) from error


def _open_store(rank: int, size: int, timeout: timedelta) -> Store:
    """A store that only the processes of this start use.

    torchrun keeps its store when it restarts the processes, with the addresses of dead ones in it, and its restart
    count differs on a host that joined later. So rank 0 draws a random prefix and sends it to every rank that requests
    it; requests are numbered, so that an answer is never older than its request.
    """
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    prefix = _send_prefix(store, size, deadline) if rank == 0 else _request_prefix(store)
    return dist.PrefixStore(f"surefoot/{prefix}", store)


def _send_prefix(store: Store, size: int, deadline: float) -> str:
    """Answer requests until all other ranks have the prefix."""
    prefix, answered = secrets.token_hex(8), 0
    while (joined := store.add(f"surefoot/received/{prefix}", 0)) < size - 1:
        requests = store.add(_REQUESTS_KEY, 0)
        for number in range(answered + 1, requests + 1):
            store.set(f"surefoot/prefix/{number}", prefix)
        answered = requests
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {joined + 1} of {size} processes joined")
        time.sleep(_POLL_SECONDS)
    return prefix


def _request_prefix(store: Store) -> str:
    number = store.add(_REQUESTS_KEY, 1)
    prefix = store.get(f"surefoot/prefix/{number}").decode()
    store.add(f"surefoot/received/{prefix}", 1)
    return prefix


def shutdown(world: World, *, failed: bool = False) -> None:
    """Leave the process group; after a failure without waiting for the other ranks, which may be gone."""
    if world.size == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    if not failed:
        with contextlib.suppress(RuntimeError):  # a rank that left early has reported its own error
            dist.all_reduce(torch.zeros(1))
    thread = threading.Thread(target=_destroy_process_group, args=(failed,), name="surefoot-part", daemon=True)
    thread.start()
    thread.join(_SHUTDOWN_SECONDS)
    if thread.is_alive():
        log.warning(
            "surefoot: rank %d gave up leaving the process group after %g s: other ranks do not answer",
            world.rank,
            _SHUTDOWN_SECONDS,
        )


def _destroy_process_group(failed: bool) -> None:
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if failed and abort is not None:
        with contextlib.suppress(Exception):  # aborts pending NCCL operations; gloo has nothing to abort
            abort()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def all_reduce_sum(world: World, number: N) -> N:
    """The sum of the number over all ranks, which all call it; runs on the CPU and does not wait for a GPU."""
    if world.size == 1:
        return number
    dtype = torch.int64 if isinstance(number, int) else torch.float64
    tensor = torch.tensor([number], dtype=dtype)
    dist.all_reduce(tensor)
    return type(number)(tensor.item())


def broadcast(world: World, value: T) -> T:
    """The value of rank 0 on all ranks, which all call it."""
    values = [value]
    if world.size > 1:
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def _read_ranks(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, world size and local rank from torchrun's environment variables."""
    given = {name: environment[name] for name in RANK_VARIABLES if environment.get(name)}
    if not given:
        return 0, 1, 0
    missing = [name for name in RANK_VARIABLES if name not in given]
    if given.get("WORLD_SIZE") != "1":
        missing += [name for name in _ADDRESS_VARIABLES if not environment.get(name)]
    if missing:
        raise ParallelError(
            f"the environment sets {_assignments(given)} but not {', '.join(missing)}, so the processes cannot find "
            f"each other. {_LAUNCH_HINT}; or unset {', '.join(given)} to train with one process."
        )
    try:
        rank, size, local_rank = (int(given[name]) for name in RANK_VARIABLES)
    except ValueError:
        raise ParallelError(f"these must be whole numbers: {_assignments(given)}. {_LAUNCH_HINT}.") from None
    if not (size >= 1 and 0 <= rank < size and 0 <= local_rank < size):
        raise ParallelError(
            f"{_assignments(given)} do not fit together: ranks go from 0 to WORLD_SIZE - 1. {_LAUNCH_HINT}."
        )
    return rank, size, local_rank


def _assignments(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())


def _choose_device(device: str, local_rank: int) -> torch.device:
    """The GPU with the number of the local rank, or the CPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise ParallelError(f"device must be auto, cpu or cuda; got {device!r}")
    num_gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not num_gpus):
        return torch.device("cpu")
    if not num_gpus:
        raise ParallelError(
            "device is cuda, but torch sees no GPU here: check the driver with nvidia-smi and torch.version.cuda, or "
            "set device=cpu."
        )
    if local_rank >= num_gpus:
        raise ParallelError(
            f"process {local_rank} of this host (LOCAL_RANK={local_rank}) needs its own GPU, but only {num_gpus} are "
            f"visible: start {num_gpus} processes on this host (--nproc-per-node {num_gpus}), make all GPUs visible to "
            "every process with CUDA_VISIBLE_DEVICES, or set device=cpu."
        )
    return torch.device("cuda", local_rank)

from __future__ import annotations

import socket

import pytest
import torch

from surefoot.parallel import (
    ParallelError,
    World,
    all_reduce_sum,
    broadcast,
    check_versions,
    init_distributed,
    shutdown,
)
from surefoot.parallel.process_group import RANK_VARIABLES, init_process_group

ALONE = World(0, 1, 0, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_no_launcher() -> None:
    world = init_distributed("cpu")
    assert world == ALONE
    assert world.is_main
    assert (all_reduce_sum(world, 3), all_reduce_sum(world, 0.5), broadcast(world, "word"), check_versions(world)) == (
        3,
        0.5,
        "word",
        [],
    )
    shutdown(world)
    assert not torch.distributed.is_initialized()


def test_one_process_under_torchrun_is_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(RANK_VARIABLES, ("0", "1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert init_distributed("cpu") == ALONE


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}, "but not MASTER_ADDR"),
        ({"WORLD_SIZE": "1"}, "but not RANK, LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "one", "LOCAL_RANK": "0"}, "whole numbers: RANK=0, WORLD_SIZE=one"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "do not fit together"),
    ],
)
def test_an_incomplete_environment_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} if len(environment) == 3 else {}
    for name, value in (master | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ParallelError, match=message) as caught:
        init_distributed("cpu")
    assert "torchrun" in str(caught.value)


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(ParallelError, match="auto, cpu or cuda; got 'gpu'"):
        init_distributed("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ParallelError, match=r"sees no GPU here.*device=cpu"):
            init_distributed("cuda")


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in zip(RANK_VARIABLES, ("3", "4", "3"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ParallelError, match=r"LOCAL_RANK=3.*only 2 are visible.*--nproc-per-node 2"):
        init_distributed("cuda")


def test_ranks_that_never_join_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(ParallelError, match=f"rank 0 of 2 could not join the other ranks at localhost:{port}"):
        init_process_group(World(0, 2, 0, torch.device("cpu")), timeout=1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: NCCL")
def test_nccl_group_also_reduces_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29731")
    world = World(0, 1, 0, torch.device("cuda", 0))
    init_process_group(world, timeout=60)
    try:
        for device in ("cpu", "cuda"):
            ones = torch.ones(2, device=device)
            torch.distributed.all_reduce(ones)
            assert ones.tolist() == [1, 1]
    finally:
        torch.distributed.destroy_process_group()

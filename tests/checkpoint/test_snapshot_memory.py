"""Where snapshots are: on the device, on the host, fewer of them, or none with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from surefoot.checkpoint import snapshot_memory
from surefoot.checkpoint.snapshot_memory import plan_snapshots

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    def with_free(host: float, device: float) -> None:
        monkeypatch.setattr(snapshot_memory, "free_bytes", lambda d: int(device if d.type == "cuda" else host))

    return with_free


def test_snapshots_are_on_the_device_if_they_fit_in_half_of_its_free_memory(
    free: Callable[[float, float], None],
) -> None:
    free(100e9, 6e9)
    assert plan_snapshots({GPU: 10**9}, None, 3).location == "device"
    free(100e9, 5.9e9)
    choice = plan_snapshots({GPU: 10**9}, None, 3)
    assert (choice.location, choice.count) == ("host", 3)
    free(5e9, 5e9)
    choice = plan_snapshots({GPU: 10**9}, None, 3)
    assert (choice.location, choice.count, choice.reason) == (
        "device",
        2,
        "2 of 1 GB each (3 do not fit), on the model's device",
    )
    free(3e9, 3e9)
    choice = plan_snapshots({GPU: 10**9}, None, 3)
    assert choice.location is None
    assert choice.reason == ("2 snapshots of 1 GB do not fit in half of the free memory (3 GB on cuda:0, 3 GB on cpu)")


def test_budget_covers_all_snapshots(free: Callable[[float, float], None]) -> None:
    free(100e9, 100e9)
    assert plan_snapshots({GPU: 10**9}, 3 * 10**9, 3).count == 3
    assert plan_snapshots({GPU: 10**9}, 3 * 10**9 - 1, 3).count == 2
    assert plan_snapshots({GPU: 10**9}, 2 * 10**9 - 1, 3).location is None


def test_model_on_two_devices_must_fit_on_each(free: Callable[[float, float], None]) -> None:
    free(100e9, 6e9)
    assert plan_snapshots({GPU: 10**9, torch.device("cuda", 1): 10**9}, None, 3).location == "device"
    assert plan_snapshots({GPU: 10**9, torch.device("cuda", 1): 2 * 10**9}, None, 3).location == "host"


def test_cpu_model_uses_host_memory(free: Callable[[float, float], None]) -> None:
    free(6e9, 0)
    assert plan_snapshots({CPU: 10**9}, None, 3).location == "device"
    free(3e9, 0)
    assert plan_snapshots({CPU: 10**9}, None, 3).location is None


def test_processes_on_one_machine_share_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = snapshot_memory.free_bytes(CPU)
    assert alone > 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert snapshot_memory.free_bytes(CPU) < alone / 100

"""Utilisation and memory bandwidth: read where there is a counter, and said once where there is none."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from surefoot.measure.device_load import DeviceLoad
from surefoot.measure.resources import SystemMonitor


def nvml_that(answers: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the driver of a device that this machine may not have."""
    asked: list[str] = []

    def handle(uuid: str) -> str:
        if not answers:
            raise RuntimeError("Insufficient Permissions")
        asked.append(uuid)
        return uuid

    module: Any = ModuleType("pynvml")
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = handle
    module.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=85, memory=40)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234-5678"))
    return asked


def test_both_are_read_from_the_driver_of_this_very_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = nvml_that(True, monkeypatch)
    load = DeviceLoad(torch.device("cuda", 0))
    assert load.read() == (0.85, 0.4)
    assert load.missing == ""
    assert asked == ["GPU-1234-5678"]


def test_a_driver_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_that(False, monkeypatch)
    load = DeviceLoad(torch.device("cuda", 0))
    assert all(map(math.isnan, load.read()))
    assert load.missing == (
        "utilisation and memory bandwidth of NVIDIA X are not measured: the driver does not answer "
        "(Insufficient Permissions)"
    )


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_that(True, monkeypatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert DeviceLoad(torch.device("cuda", 0)).missing.endswith("pip install 'surefoot[nvml]' (nvidia-ml-py)")
    assert "no counter for such devices" in DeviceLoad(torch.device("mps")).missing


def test_a_cpu_needs_nothing() -> None:
    assert SystemMonitor(torch.device("cpu"), every=1.0).missing == ""


def test_a_device_is_read(cuda: torch.device) -> None:
    load = DeviceLoad(cuda)
    assert load.missing or all(0 <= value <= 1 for value in load.read())

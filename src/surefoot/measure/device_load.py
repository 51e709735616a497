"""How busy a device and its memory are, from the driver's own counters; reading them does not wait for the device."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from surefoot.records import NAN

_UNKNOWN = NAN, NAN
_WITHOUT = "utilisation and memory bandwidth of {name} are not measured: {why}"


class DeviceLoad:
    """Reads both as fractions from 0 to 1. `missing` says once why they are unknown, and what to install."""

    def __init__(self, device: torch.device) -> None:
        self.missing = ""
        self._handle: Any = None
        self._nvml: Any = None
        self._amd: torch.device | None = None
        if device.type == "cpu":
            return  # the process's own time is measured instead
        why = self._open(device)
        if why:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type} device"
            self.missing = _WITHOUT.format(name=name, why=why)

    def read(self) -> tuple[float, float]:
        """Utilisation and memory bandwidth; NaN where unknown."""
        try:
            if self._handle is not None:
                rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
                return rates.gpu / 100, rates.memory / 100
            if self._amd is not None:
                return torch.cuda.utilization(self._amd) / 100, torch.cuda.memory_usage(self._amd) / 100
        except Exception:  # the driver may lose the device while training goes on
            self._handle = self._amd = None
        return _UNKNOWN

    def _open(self, device: torch.device) -> str:
        """Why there is nothing to read; empty if there is."""
        if device.type != "cuda":
            return "there is no counter for such devices"
        if torch.version.hip is not None:
            if importlib.util.find_spec("amdsmi") is None:
                return "install amdsmi, which comes with ROCm: pip install /opt/rocm/share/amd_smi"
            self._amd = device
            return "" if self._answers() else "amdsmi does not answer for this device"
        if importlib.util.find_spec("pynvml") is None:
            return "pip install 'surefoot[nvml]' (nvidia-ml-py)"
        return self._open_nvml(device)

    def _open_nvml(self, device: torch.device) -> str:
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            # By its id: CUDA_VISIBLE_DEVICES changes torch's numbers, not the driver's.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle, self._nvml = nvml.nvmlDeviceGetHandleByUUID(uuid), nvml
        except Exception as error:  # no permission in a container, an old driver, a slice of a device (MIG)
            return f"the driver does not answer ({error})"
        return "" if self._answers() else "the driver has no such counter for it"

    def _answers(self) -> bool:
        return self.read()[0] == self.read()[0]  # not NaN

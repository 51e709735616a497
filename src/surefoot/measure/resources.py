"""Step times, memory and utilisation of the device, and the environment that a run records about itself."""

from __future__ import annotations

import math
import os
import platform
import random
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from surefoot.measure.device_load import DeviceLoad
from surefoot.records import NAN


class StepTimer:
    """Times the steps on the host."""

    def __init__(self) -> None:
        self._ended = math.nan
        self._forward = math.nan
        self._mean_seconds = math.nan

    def forward_began(self) -> None:
        """Mark the first forward pass after a step: the time before it was spent waiting for data."""
        if math.isnan(self._forward):
            self._forward = time.perf_counter()

    def step_ended(self) -> tuple[float, float]:
        """Seconds since the last step ended, and how many of them passed before the forward pass began."""
        now = time.perf_counter()
        seconds, wait = now - self._ended, self._forward - self._ended
        self._ended, self._forward = now, math.nan
        if not math.isnan(seconds):
            self._mean_seconds = (
                seconds if math.isnan(self._mean_seconds) else 0.98 * self._mean_seconds + 0.02 * seconds
            )
        return seconds, wait

    def seconds_for(self, steps: float) -> float:
        """Seconds that this many more steps will take at the current pace."""
        return max(steps, 0.0) * self._mean_seconds


@dataclass(frozen=True, slots=True)
class SystemReading:
    """Memory in bytes and utilisation from 0 to 1; NaN where unknown."""

    memory: float = NAN
    memory_peak: float = NAN
    memory_reserved: float = NAN
    utilisation: float = NAN
    memory_bandwidth: float = NAN


class SystemMonitor:
    """Reads memory and utilisation of the model's device, at most every `every` seconds."""

    def __init__(self, device: torch.device, *, every: float) -> None:
        self._device = device
        self._every = every
        self._due = 0.0
        self._cpu_time = (time.perf_counter(), time.process_time())
        self._load = DeviceLoad(device)
        self.missing = self._load.missing
        """What keeps utilisation from being measured, and the way out; empty where it is."""

    def read(self) -> SystemReading:
        """A reading when one is due, else an empty reading."""
        now = time.perf_counter()
        if now < self._due:
            return _NO_READING
        self._due = now + self._every
        return self._cuda() if self._device.type == "cuda" else self._host(now)

    def _cuda(self) -> SystemReading:
        stats = torch.cuda.memory_stats(self._device)
        used = stats.get("allocated_bytes.all.current", 0)
        utilisation, memory_bandwidth = self._load.read()
        return SystemReading(
            memory=used,
            memory_peak=stats.get("allocated_bytes.all.peak", 0),
            memory_reserved=stats.get("reserved_bytes.all.current", 0) - used,
            utilisation=utilisation,
            memory_bandwidth=memory_bandwidth,
        )

    def _host(self, now: float) -> SystemReading:
        last_read, last_cpu = self._cpu_time
        self._cpu_time = (now, time.process_time())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        utilisation = (self._cpu_time[1] - last_cpu) / ((now - last_read) * cores) if now > last_read else NAN
        memory, peak = _resident_memory()
        return SystemReading(memory=memory, memory_peak=peak, utilisation=min(utilisation, 1.0))


_NO_READING = SystemReading()


def _resident_memory() -> tuple[float, float]:
    """Resident memory of this process in bytes, now and at its peak; NaN where unknown."""
    try:
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        return float(fields["VmRSS"].split()[0]) * 1024, float(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        return NAN, NAN


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Code version, seeds and environment, for `run.json`."""
    return {
        "code": _git_version(),
        "seeds": {
            "torch": torch.initial_seed(),
            "numpy_state": _fingerprint(np.random.get_state()),
            "python_state": _fingerprint(random.getstate()),
        },
        "environment": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "numpy": np.__version__,
            "platform": platform.platform(),
            "host": platform.node(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
            "argv": sys.argv,
        },
    }


def _fingerprint(state: object) -> str:
    """Short hash of a random state: no seed can be recovered from it, but equal states can be recognised."""
    return f"{zlib.crc32(repr(state).encode()):08x}"


def _git_version() -> dict[str, Any]:
    """Commit of the code in the working directory, if it is a git checkout."""
    commit = _command_output("git", "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None}
    return {"commit": commit, "changed": bool(_command_output("git", "status", "--porcelain", "--untracked-files=no"))}


def _command_output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()

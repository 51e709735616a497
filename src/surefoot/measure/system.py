"""Where the time goes and what the machine is doing, read often enough and never at a cost."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.records import NAN


class StepTimer:
    """Marks the moments of a step on the host."""

    def __init__(self) -> None:
        self._ended = math.nan
        self._forward = math.nan
        self._pace = math.nan

    def forward_began(self) -> None:
        """The first forward pass after a step: what came before it was waiting for data."""
        if math.isnan(self._forward):
            self._forward = time.perf_counter()

    def step_ended(self) -> tuple[float, float]:
        """Seconds since the step before ended, and how many of them passed before the forward pass began."""
        now = time.perf_counter()
        seconds, wait = now - self._ended, self._forward - self._ended
        self._ended, self._forward = now, math.nan
        if not math.isnan(seconds):
            self._pace = seconds if math.isnan(self._pace) else 0.98 * self._pace + 0.02 * seconds
        return seconds, wait

    def left(self, steps: float) -> float:
        """Seconds that this many more steps will take at the present pace."""
        return max(steps, 0.0) * self._pace


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory in bytes and utilisation from 0 to 1; NaN where the machine does not tell."""

    memory: float = NAN
    memory_peak: float = NAN
    memory_reserved: float = NAN
    utilisation: float = NAN


class SystemMonitor:
    """Reads memory and utilisation of the device the model lives on, every few seconds."""

    def __init__(self, device: torch.device, *, every: float) -> None:
        self._device = device
        self._every = every
        self._due = 0.0
        self._busy = (time.perf_counter(), time.process_time())
        self._nvml = _nvml() if device.type == "cuda" else False

    def read(self) -> Reading:
        """A reading when one is due, else an empty one."""
        now = time.perf_counter()
        if now < self._due:
            return _NOTHING
        self._due = now + self._every
        return self._cuda() if self._device.type == "cuda" else self._host(now)

    def _cuda(self) -> Reading:
        stats = torch.cuda.memory_stats(self._device)
        used = stats.get("allocated_bytes.all.current", 0)
        return Reading(
            memory=used,
            memory_peak=stats.get("allocated_bytes.all.peak", 0),
            memory_reserved=stats.get("reserved_bytes.all.current", 0) - used,
            utilisation=torch.cuda.utilization(self._device) / 100 if self._nvml else NAN,
        )

    def _host(self, now: float) -> Reading:
        then, worked = self._busy
        self._busy = (now, time.process_time())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        spent = (self._busy[1] - worked) / ((now - then) * cores) if now > then else NAN
        memory, peak = _resident()
        return Reading(memory=memory, memory_peak=peak, utilisation=min(spent, 1.0))


_NOTHING = Reading()


def _resident() -> tuple[float, float]:
    """Bytes this process holds in memory now and held at most, where the system tells."""
    try:
        with open("/proc/self/status") as file:
            told = dict(line.split(":", 1) for line in file)
        return float(told["VmRSS"].split()[0]) * 1024, float(told["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        return NAN, NAN


def _nvml() -> bool:
    return importlib.util.find_spec("pynvml") is not None


def samples_in(batch: Any) -> float:
    """The number of samples in whatever a loader hands out: the first length of the first tensor found."""
    if isinstance(batch, Tensor):
        return float(batch.shape[0]) if batch.dim() else NAN
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for part in inside:
        found = samples_in(part)
        if not math.isnan(found):
            return found
    return NAN

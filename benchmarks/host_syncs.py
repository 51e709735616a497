"""How often a step makes the host wait for the device, as the profiler counts it."""

from __future__ import annotations

from collections.abc import Callable

import torch

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "hipStreamSynchronize")
"""Runtime calls that hold the host until the device has caught up."""


def count_synchronisations(step: Callable[[], None], *, steps: int) -> float:
    """Waits a step, over some steps of a loop that is already warm."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(steps):
            step()
    found = sum(1 for event in profile.events() or () if event.name in WAITS)
    return found / steps

"""Counts how often a step makes the host wait for the device, as the profiler sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

SYNC_CALLS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "hipStreamSynchronize",
)
"""Runtime calls that block the host until the device has caught up."""


def count_host_syncs(step: Callable[[], None], *, steps: int) -> float:
    """Host syncs per step, over some steps of a warm loop."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(steps):
            step()
    return sum(event.name in SYNC_CALLS for event in profile.events() or ()) / steps

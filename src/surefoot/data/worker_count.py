"""How many processes should read the data of a rank: by default, and by what a trial has measured."""

from __future__ import annotations

import math
import os
from typing import Literal

Workers = int | Literal["auto"]
MAX_AUTO_WORKERS = 4
"""The usual advice is 4 to 8 for each device; more cost memory before it is known whether they help."""


def cores_per_rank() -> int:
    """Processor cores that this process may use, shared with the other ranks of its host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def resolve_workers(workers: Workers, *, cheap: bool) -> int:
    """The number of worker processes; `auto` means none where samples are `cheap`, slices of tokens in memory, else one
    for each core beyond the first, up to four."""
    if workers != "auto":
        return workers
    return 0 if cheap else min(MAX_AUTO_WORKERS, cores_per_rank() - 1)


def workers_needed(workers: int, *, compute: float, wait: float) -> int:
    """How many workers would read batches as fast as they are used, where a step that computes for `compute` seconds
    waits `wait` seconds for its batch with `workers` of them."""
    reading = wait if workers == 0 else workers * (wait + compute)  # seconds that one worker reads for one batch
    return max(1, math.ceil(reading / compute))

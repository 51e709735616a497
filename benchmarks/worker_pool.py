"""Many runs at once: processes of one core each, which end with whoever started them."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

from surefoot.process_identity import end_with_parent

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(work: Callable[[T], R], of: Sequence[T], workers: int) -> Iterator[R]:
    """The work done with each, in so many processes; what is ready first comes first."""
    if not of:
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        for future in as_completed([pool.submit(work, one) for one in of]):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """A worker has one core, says nothing of its own, and does not outlive a bench that was killed."""
    torch.set_num_threads(1)
    logging.getLogger("surefoot").setLevel(logging.CRITICAL)
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        end_with_parent(parent.pid)

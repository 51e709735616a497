"""Runs independent tasks in worker processes of one core each, which end with the benchmark that started them."""

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


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_unordered(task: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """Apply `task` to every item in worker processes and yield the results as they finish."""
    if not items:
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_init_worker)
    try:
        for future in as_completed([pool.submit(task, item) for item in items]):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _init_worker() -> None:
    """Use one core, log nothing, and exit when the parent process is killed."""
    torch.set_num_threads(1)
    logging.getLogger("surefoot").setLevel(logging.CRITICAL)
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        end_with_parent(parent.pid)

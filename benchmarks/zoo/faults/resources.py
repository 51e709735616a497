"""Faults around the model: memory, the loader, other ranks."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from benchmarks.zoo.families import MicroBatch
from benchmarks.zoo.scenario import fault
from benchmarks.zoo.training import ZooRun
from surefoot.records import Cause


@fault(Cause.MEMORY_LEAK, on={"convolution": "...", "memory": "..."}, strengths=(0.2, 0.8, 2.5), curable=False)
def memory_leak(run: ZooRun, at: int, strength: float) -> None:
    """Every step leaks some megabytes."""
    leaked: list[Tensor] = []

    def leak(step: int) -> None:
        if step >= at:
            leaked.append(torch.ones(int(strength * 2**18)))
        if step == run.steps - 1:
            leaked.clear()

    run.after_step(leak)


def _wait(batch: MicroBatch, seconds: float) -> MicroBatch:
    time.sleep(seconds)
    return batch


@fault(
    Cause.DATA_STARVATION,
    on={"plain": "...", "encoder": "..."},
    strengths=(0.005, 0.02, 0.05),
    curable=False,
    steps=200,
)
def data_starvation(run: ZooRun, at: int, strength: float) -> None:
    """Every batch comes late."""
    run.on_batch(lambda step, batch: _wait(batch, strength) if step >= at else batch)


@fault(
    Cause.RANK_FAULT,
    on={"recurrent": "...", "encoder": "..."},
    strengths=(0.005, 0.02, 0.05),
    curable=False,
    ranks=2,
    steps=200,
)
def slow_rank(run: ZooRun, at: int, strength: float) -> None:
    """One rank gets every batch late, and the others wait for it."""
    run.on_batch(lambda step, batch: _wait(batch, strength) if step >= at and run.rank == 1 else batch)


@fault(Cause.RANK_FAULT, on={"plain": "!!!", "residual": "!!!"}, strengths=(1.0, 3.0, 10.0), ranks=2, steps=200)
def nan_on_one_rank(run: ZooRun, at: int, strength: float) -> None:
    """For a few steps one rank gets a batch of NaN, and its gradients reach all ranks."""

    def poisoned(step: int, batch: MicroBatch) -> MicroBatch:
        return batch.replace(x=batch.x * math.nan) if at <= step < at + strength and run.rank == 1 else batch

    run.on_batch(poisoned)

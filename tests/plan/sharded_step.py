"""Trains steps with FSDP as one of 8 ranks, the others being only pretended, and prints planned and real peaks.

Run by `test_sharded.py` in a process of its own, because it makes a process group.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from surefoot import parallel
from surefoot.parallel import World
from surefoot.plan.fake_step import language_batch, loss_function_of, mean_loss
from surefoot.plan.memory_plan import MemoryPlanner
from surefoot.plan.model_size import model_size
from surefoot.train import speed
from surefoot.train.make_model import make_model
from surefoot.train.mixed_precision import Precision
from surefoot.train.optimizers import make_optimizers
from surefoot.train.recipe import Recipe, load

RANKS = 8
SHAPE = ("model.width=256", "model.layers=6", "model.heads=4", "model.vocab=2048", "model.context=64")
SIZE = ("data.context=64", "batch.size=16", "precision.compute=bfloat16")
CASES = (
    ("parallel.strategy=zero3",),
    ("parallel.strategy=zero2",),
    ("parallel.strategy=zero3", "batch.accumulate=2"),
    ("parallel.strategy=zero3", "speed.checkpoint_activations=1"),
)


def real_peak(recipe: Recipe, world: World) -> int:
    """Bytes at the peak of the third step, counted by MemTracker on real tensors."""
    model = make_model(recipe)
    precision = Precision(recipe.precision, world.device, sharded=True)
    precision.prepare(model)
    speed.checkpoint_activations(model, recipe.speed.checkpoint_activations)
    model = parallel.wrap_model(model, recipe.parallel.strategy, world, compute_dtype=precision.compute)
    optimizers = make_optimizers(model, recipe.optimizer)
    loss_function, batch = loss_function_of(recipe), language_batch(recipe)()
    tracker: Any = MemTracker()
    tracker.track_external(model, *optimizers)
    with tracker:
        for number in range(3):
            if number == 2:
                tracker._peak_mem, tracker._peak_mem_snap = {}, {}
            for passed in range(recipe.batch.accumulate):
                with parallel.grad_sync(model, passed == recipe.batch.accumulate - 1):
                    mean_loss(loss_function, model, batch).backward()
                tracker.reset_mod_stats()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    world, peaks = World(0, RANKS, 0, torch.device("cpu")), {}
    for case in CASES:
        recipe = load("lm-tiny", [*SHAPE, *SIZE, *case])[0]
        planned = MemoryPlanner(model_size(recipe), on_gpu=False).plan(recipe, RANKS)
        peaks[" ".join(case)] = (planned.allocated, real_peak(recipe, world))
    dist.destroy_process_group()
    json.dump(peaks, sys.stdout)


if __name__ == "__main__":
    main()

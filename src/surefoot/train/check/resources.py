"""Memory at its peak against what is there, speed, and the time that the whole run will take."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import torch
from rich.filesize import decimal

from surefoot.journal.reader import Run
from surefoot.parallel import World
from surefoot.train.check.item import Item, ok, skipped, warning
from surefoot.train.check.rows import every, landed, settled
from surefoot.train.check.trial import Trial
from surefoot.train.figures import span
from surefoot.train.recipe import Recipe

_FULL, _WAITS, _IDLE = 0.9, 0.2, 0.6
_LARGER = "Make batch.size smaller and batch.accumulate larger by as much, or set speed.checkpoint_activations=1."


def answers(trial: Trial, run: Run, recipe: Recipe, world: World) -> Iterator[Item]:
    yield host_memory()
    if world.device.type == "cuda":
        yield _device_memory(world.device)
    yield _speed(trial, run, world)
    yield _whole(trial, run, recipe)


def host_memory() -> Item:
    """The most this process has had so far, against what the machine has."""
    peak, there = _peak(), psutil.virtual_memory()
    found = f"{decimal(peak)} at its peak, {decimal(there.available)} still free of {decimal(there.total)}"
    figures = {"peak": peak, "free": there.available, "total": there.total}
    if there.available < (1 - _FULL) * there.total:
        return warning("memory of the host", found, f"{_LARGER} Or fewer data.workers.", **figures)
    return ok("memory of the host", found, **figures)


def _peak() -> int:
    """Bytes, where the system tells its peak; else those in use now."""
    told = psutil.Process().memory_info()
    if hasattr(told, "peak_wset"):
        return int(told.peak_wset)
    try:
        import resource
        import sys

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(most if sys.platform == "darwin" else most * 1024)
    except ImportError:
        return int(told.rss)


def _device_memory(device: torch.device) -> Item:
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    there = torch.cuda.get_device_properties(device).total_memory
    found = f"{decimal(peak)} at its peak, {decimal(reserved)} reserved, of {decimal(there)} ({reserved / there:.0%})"
    figures = {"peak": peak, "reserved": reserved, "total": there}
    if reserved > _FULL * there:
        return warning("memory of the device", found, _LARGER, **figures)
    return ok("memory of the device", found, **figures)


def _speed(trial: Trial, run: Run, world: World) -> Item:
    name, seconds = "speed", settled(landed(run, "seconds"))
    if not len(seconds):
        return skipped(name, "too few updates to time")
    each, waits = float(np.median(seconds)), settled(landed(run, "data_wait"))
    wait = float(np.median(waits)) / each if len(waits) and each > 0 else 0.0
    tokens, samples = settled(landed(run, "tokens")), trial.facts.effective_batch
    figures: dict[str, float | None] = {"seconds_an_update": each, "data_wait": wait, "samples_per_s": samples / each}
    found = f"{each:.3g} s an update, {samples / each:,.{0 if samples > 10 * each else 1}f} samples/s"
    if len(tokens):
        figures["tokens_per_s"] = float(np.median(tokens)) / each
        found += f", {figures['tokens_per_s']:,.0f} tokens/s"
    found += f", {wait:.0%} of the time waits for data"
    busy = settled(every(run, "utilisation")) if world.device.type == "cuda" else np.empty(0)
    if len(busy):
        figures["utilisation"] = float(busy.mean())
        found += f", the device is busy {busy.mean():.0%} of the time"
    if wait > _WAITS:
        return warning(name, found, "Data holds it up: set data.workers=4 or more, and raise data.prefetch.", **figures)
    if len(busy) and busy.mean() < _IDLE:
        return warning(name, found, "Launches hold it up: raise batch.size, or set speed.compile=true.", **figures)
    return ok(name, found, **figures)


def _whole(trial: Trial, run: Run, recipe: Recipe) -> Item:
    name, seconds = "time for the whole run", settled(landed(run, "seconds"))
    if not len(seconds):
        return skipped(name, "too few updates to time")
    total, often = trial.facts.total, recipe.evaluation.every
    training = total * float(seconds.mean())
    evaluating = total // often * trial.evaluation_seconds if often else 0.0
    found = f"about {span(training + evaluating)} for {total:,} updates"
    if evaluating >= 0.01 * training:
        found += f", of which {span(evaluating)} go to evaluation"
    return ok(name, found, seconds=training + evaluating, updates=total)

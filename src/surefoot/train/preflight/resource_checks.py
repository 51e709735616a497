"""Resource checks: peak memory, speed, and the time the whole run will take."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import psutil
import torch
from rich.filesize import decimal

from surefoot.data.worker_count import cores_per_rank, workers_needed
from surefoot.journal.reader import Run
from surefoot.parallel import World
from surefoot.sinks.progress import format_duration
from surefoot.train.preflight.journal_columns import applied, attempted, later_half
from surefoot.train.preflight.report import CheckItem, ok, skipped, warning
from surefoot.train.preflight.trial import ShortRun
from surefoot.train.recipe import Recipe

_MEMORY_FULL, _DATA_BOUND, _DEVICE_IDLE = 0.9, 0.2, 0.6
_LESS_MEMORY = "Lower batch.size and raise batch.accumulate by the same factor, or set speed.checkpoint_activations=1."


def items(trial: ShortRun, run: Run, recipe: Recipe, world: World) -> Iterator[CheckItem]:
    yield host_memory()
    if world.device.type == "cuda":
        yield _device_memory(world.device)
    yield _speed(trial, run, world)
    yield _total_time(trial, run, recipe)


def host_memory() -> CheckItem:
    """Peak memory of this process so far, and what the machine has left."""
    name, peak, memory = "host memory", _peak_memory(), psutil.virtual_memory()
    message = f"peak {decimal(peak)}, {decimal(memory.available)} of {decimal(memory.total)} free"
    values = {"peak": peak, "free": memory.available, "total": memory.total}
    if memory.available < (1 - _MEMORY_FULL) * memory.total:
        return warning(name, message, f"{_LESS_MEMORY} Or use fewer data.workers.", **values)
    return ok(name, message, **values)


def _peak_memory() -> int:
    """Bytes; the current use where the system does not know the peak."""
    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):
        return int(info.peak_wset)
    try:
        import resource
    except ImportError:
        return int(info.rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def _device_memory(device: torch.device) -> CheckItem:
    name = "device memory"
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    message = f"peak {decimal(peak)}, {decimal(reserved)} reserved, of {decimal(total)} ({reserved / total:.0%})"
    values = {"peak": peak, "reserved": reserved, "total": total}
    if reserved > _MEMORY_FULL * total:
        return warning(name, message, _LESS_MEMORY, **values)
    return ok(name, message, **values)


def _speed(trial: ShortRun, run: Run, world: World) -> CheckItem:
    name, seconds = "speed", later_half(applied(run, "seconds"))
    if not len(seconds):
        return skipped(name, "too few updates to time")
    per_update, waits = float(np.median(seconds)), later_half(applied(run, "data_wait"))
    wait = float(np.median(waits)) / per_update if len(waits) and per_update > 0 else 0.0
    tokens, samples = later_half(applied(run, "tokens")), trial.facts.effective_batch
    samples_per_s = samples / per_update
    values: dict[str, float | None] = {
        "seconds_an_update": per_update,
        "data_wait": wait,
        "samples_per_s": samples_per_s,
    }
    message = f"{per_update:.3g} s per update, {samples_per_s:,.{0 if samples > 10 * per_update else 1}f} samples/s"
    if len(tokens):
        values["tokens_per_s"] = float(np.median(tokens)) / per_update
        message += f", {values['tokens_per_s']:,.0f} tokens/s"
    message += f", {wait:.0%} of the time waiting for data"
    utilisation = later_half(attempted(run, "utilisation")) if world.device.type == "cuda" else np.empty(0)
    if len(utilisation):
        values["utilisation"] = float(utilisation.mean())
        message += f", the device is busy {utilisation.mean():.0%} of the time"
    if wait > _DATA_BOUND:
        return warning(name, message, _more_workers(trial.facts.workers, per_update, wait), **values)
    if len(utilisation) and utilisation.mean() < _DEVICE_IDLE:
        fix = "Kernel launches are the bottleneck: raise batch.size, or set speed.compile=true."
        return warning(name, message, fix, **values)
    return ok(name, message, **values)


def _more_workers(workers: int, seconds: float, wait: float) -> str:
    """What to do about a step of which the share `wait` goes into waiting for data."""
    needed = workers_needed(workers, compute=(1 - wait) * seconds, wait=wait * seconds)
    measured = f"Data loading is the bottleneck: with {workers} workers it keeps {1 - wait:.0%} of the pace. "
    if needed <= cores_per_rank():
        return f"{measured}Set data.workers={needed}."
    return (
        f"{measured}It would take about {needed}, and this rank has {cores_per_rank()} cores: "
        f"set data.workers={cores_per_rank()}, and make samples cheaper to read."
    )


def _total_time(trial: ShortRun, run: Run, recipe: Recipe) -> CheckItem:
    name, seconds = "total time", later_half(applied(run, "seconds"))
    if not len(seconds):
        return skipped(name, "too few updates to time")
    total, eval_every = trial.facts.total, recipe.evaluation.every
    training = total * float(seconds.mean())
    evaluating = total // eval_every * trial.eval_seconds if eval_every else 0.0
    message = f"about {format_duration(training + evaluating)} for {total:,} updates"
    if evaluating >= 0.01 * training:
        message += f", of which {format_duration(evaluating)} for evaluation"
    return ok(name, message, seconds=training + evaluating, updates=total)

"""Learning rate schedules: a warmup, then one of six shapes.

Updates are counted from 0, as torch's schedulers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from surefoot.journal.output_files import save_figure
from surefoot.train.recipe.schema import ScheduleSection

Shape = Callable[[int, int], float]
"""From the updates since the warmup, and their total, to a fraction of the peak lr."""


def make_schedule(optimizer: Optimizer, spec: ScheduleSection, total: int) -> LambdaLR:
    """The schedule of all parameter groups of an optimizer, each relative to its own lr.

    Its state is the number of updates, not the shape: a resumed run with more steps follows the new schedule.
    """
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    check_schedule(spec, max(peaks), total)
    schedule = LambdaLR(optimizer, [_factor(spec, peak, total) for peak in peaks])
    # Loss scaling may skip the first update; torch would warn that the schedule was stepped before the optimizer.
    setattr(optimizer, "_opt_called", True)
    return schedule


def learning_rates(spec: ScheduleSection, peak: float, total: int) -> list[float]:
    """The lr of each update of a run."""
    check_schedule(spec, peak, total)
    factor = _factor(spec, peak, total)
    return [peak * factor(update) for update in range(total)]


def check_schedule(spec: ScheduleSection, peak: float, total: int) -> None:
    """Refuse a schedule that never reaches its peak lr."""
    if spec.start > peak:
        raise ValueError(
            f"schedule.start: the warmup starts at {spec.start:g}, above the peak lr {peak:g}. Lower schedule.start, "
            "or raise optimizer.lr"
        )
    if spec.warmup >= 1 and updates(spec.warmup, total) >= total:
        raise ValueError(
            f"schedule.warmup: {spec.warmup:g} updates of warmup in a run of {total} would never reach the peak lr. "
            "Give a fraction of the run, such as 0.05, or raise steps"
        )


def updates(length: float, total: int) -> int:
    """A length from the recipe in updates; below 1 it is a fraction of the run."""
    return round(length * total) if length < 1 else round(length)


def _factor(spec: ScheduleSection, peak: float, total: int) -> Callable[[int], float]:
    # A function, not an object: torch would save an object's fields, and a resumed run would keep the old length.
    warmup = updates(spec.warmup, total)
    shape = _shape(spec, warmup, total)
    start = min(1.0, spec.start / peak) if peak else 1.0

    def factor(update: int) -> float:
        if update < warmup:
            return start + (1 - start) * update / warmup
        return shape(min(update, total) - warmup, max(1, total - warmup))

    return factor


def _shape(spec: ScheduleSection, warmup: int, total: int) -> Shape:
    lowest, span = spec.min_lr_ratio, 1 - spec.min_lr_ratio
    every = max(1, updates(spec.every, total))

    def cosine(t: int, last: int) -> float:
        return lowest + span / 2 * (1 + math.cos(math.pi * t / last))

    def restarts(t: int, last: int) -> float:
        return cosine(t * spec.cycles % last if t < last else last, last)

    def polynomial(t: int, last: int) -> float:
        return lowest + span * (1 - t / last) ** spec.power

    def step(t: int, _: int) -> float:  # counted from the start of the run, as milestones usually are
        return spec.factor ** ((warmup + t) // every)

    shapes: dict[str, Shape] = {
        "constant": lambda t, last: 1.0,
        "linear": lambda t, last: lowest + span * (1 - t / last),
        "cosine": cosine,
        "restarts": restarts,
        "polynomial": polynomial,
        "step": step,
    }
    return shapes[spec.name]


def sparkline(spec: ScheduleSection, peak: float, total: int, width: int = 48) -> str:
    """The schedule as one line of block characters, scaled to its peak."""
    values = learning_rates(spec, peak, total)
    width = min(width, total)
    picked = [values[round(column * (total - 1) / max(1, width - 1))] for column in range(width)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * value / max(picked)))] if value > 0 else "▁" for value in picked)


def plot_schedule(
    spec: ScheduleSection, peak: float, total: int, path: Path, *, inputs: Sequence[str] = (), force: bool = False
) -> bool:
    """Plot the lr over the run to a file; returns False, and writes none, if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    values = learning_rates(spec, peak, total)
    figure = Figure(figsize=(8, 3), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.plot(range(total), values, color="#2563eb", drawstyle="steps-post" if spec.name == "step" else "default")
    axes.set_ylim(0, max(values) * 1.05)
    axes.set_xlabel("update")
    axes.set_ylabel("lr")
    warmup = updates(spec.warmup, total)
    axes.set_title(f"{spec.name}, {warmup} updates of warmup, peak {peak:g}", loc="left", fontsize=10)
    axes.grid(color="#e4e8ec")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, inputs=inputs, force=force)
    return True

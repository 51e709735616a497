"""The rate of every update, from the first to the last: a warmup, then one of six shapes.

Updates are counted from 0: update `t` of `total` is made with `rate(t)`, as torch's schedulers count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from surefoot.journal.output_files import save_figure
from surefoot.train.recipe.schema import Schedule

Share = Callable[[int, int], float]
"""From updates made since the warmup, and how many there are, to a share of the peak rate."""


def make_schedule(optimizer: Optimizer, spec: Schedule, total: int) -> LambdaLR:
    """The schedule of all groups of an optimizer, each from the rate it was made with.

    What is saved of it is the number of updates made, not the shape: a run that is made longer follows the new one.
    """
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    check(spec, max(peaks), total)
    schedule = LambdaLR(optimizer, [_factor(spec, peak, total) for peak in peaks])
    # Loss scaling may step over the first update, which torch would take for a mistake in the loop and warn of.
    setattr(optimizer, "_opt_called", True)
    return schedule


def rates(spec: Schedule, base: float, total: int) -> list[float]:
    """The rate of each update of a run."""
    check(spec, base, total)
    factor = _factor(spec, base, total)
    return [base * factor(update) for update in range(total)]


def check(spec: Schedule, base: float, total: int) -> None:
    """Refuse a schedule that never reaches its peak."""
    if spec.start > base:
        raise ValueError(
            f"schedule.start: the warmup begins with {spec.start:g}, above the rate it should lead up to, "
            f"{base:g}. Lower schedule.start, or raise optimizer.lr"
        )
    if spec.warmup >= 1 and updates(spec.warmup, total) >= total:
        raise ValueError(
            f"schedule.warmup: {spec.warmup:g} updates of warmup in a run of {total} would never reach the full rate. "
            "Give a share of the run, such as 0.05, or raise steps"
        )


def updates(given: float, total: int) -> int:
    """A length of the recipe in updates: below 1 it is a share of the run."""
    return round(given * total) if given < 1 else round(given)


def _factor(spec: Schedule, base: float, total: int) -> Callable[[int], float]:
    # A function and not an object: torch would save an object's fields, and a longer run would end where the old did.
    warmup = updates(spec.warmup, total)
    shape = _shape(spec, warmup, total)
    start = min(1.0, spec.start / base) if base else 1.0

    def factor(update: int) -> float:
        if update < warmup:
            return start + (1 - start) * update / warmup
        return shape(min(update, total) - warmup, max(1, total - warmup))

    return factor


def _shape(spec: Schedule, warmup: int, total: int) -> Share:
    floor, fall = spec.floor, 1 - spec.floor
    every = max(1, updates(spec.every, total))

    def cosine(t: int, last: int) -> float:
        return floor + fall / 2 * (1 + math.cos(math.pi * t / last))

    def restarts(t: int, last: int) -> float:
        return cosine(t * spec.cycles % last if t < last else last, last)

    def polynomial(t: int, last: int) -> float:
        return floor + fall * (1 - t / last) ** spec.power

    def step(t: int, _: int) -> float:  # from the start of the run, where other people's milestones are counted
        return spec.factor ** ((warmup + t) // every)

    shapes: dict[str, Share] = {
        "constant": lambda t, last: 1.0,
        "linear": lambda t, last: floor + fall * (1 - t / last),
        "cosine": cosine,
        "restarts": restarts,
        "polynomial": polynomial,
        "step": step,
    }
    return shapes[spec.name]


def sparkline(spec: Schedule, base: float, total: int, width: int = 48) -> str:
    """The schedule as one line of a terminal, as high as its peak."""
    values = rates(spec, base, total)
    width = min(width, total)
    picked = [values[round(at * (total - 1) / max(1, width - 1))] for at in range(width)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * value / max(picked)))] if value > 0 else "▁" for value in picked)


def draw(
    spec: Schedule, base: float, total: int, path: Path, *, inputs: Sequence[str] = (), force: bool = False
) -> bool:
    """Draw the rate over the run into a file; False, and no file, where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    values = rates(spec, base, total)
    picture = Figure(figsize=(8, 3), layout="constrained", facecolor="white")
    axes = picture.subplots()
    axes.plot(range(total), values, color="#2563eb", drawstyle="steps-post" if spec.name == "step" else "default")
    axes.set_ylim(0, max(values) * 1.05)
    axes.set_xlabel("update")
    axes.set_ylabel("rate")
    warmup = updates(spec.warmup, total)
    axes.set_title(f"{spec.name}, {warmup} updates of warmup, peak {base:g}", loc="left", fontsize=10)
    axes.grid(color="#e4e8ec")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(picture, path, inputs=inputs, force=force)
    return True

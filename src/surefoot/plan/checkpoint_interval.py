"""How often to save: the interval that wastes least, by the cost of a save and the rate of failures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.plan.page import PageSection, format_bytes, format_hours
from surefoot.plan.plan_error import PlanError
from surefoot.train.recipe import Recipe

HOURS_BETWEEN_FAILURES = 50_000.0
"""Of one GPU. Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024)."""
_COPY = 25e9
"""Assumed bytes per second from a GPU to the host's memory."""
_LONGEST = 3600.0


@dataclass(frozen=True, slots=True)
class CheckpointInterval:
    """When to save; times in seconds."""

    state: int
    """Bytes of a checkpoint, all ranks together."""
    stall: float
    """By which a save stops training: the copy to the host."""
    write: float
    """Until it is on disk, in the background."""
    between_failures: float
    """Mean time, all GPUs together."""
    young: float
    daly: float
    chosen: float
    """At least the time to write, at most an hour."""
    steps: int
    lost: float
    """Expected share of the time that saves and repeated work take."""


def young(cost: float, between_failures: float) -> float:
    """Young (1974): sqrt(2 x cost of a save x mean time between failures)."""
    return math.sqrt(2 * cost * between_failures)


def daly(cost: float, between_failures: float) -> float:
    """Daly (2006), which is more exact when failures are frequent."""
    if cost >= 2 * between_failures:
        return between_failures
    ratio = cost / (2 * between_failures)
    return young(cost, between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def checkpoint_interval(
    state: int, ranks: int, update_seconds: float, *, disk: float, hours_between_failures: float
) -> CheckpointInterval:
    """From bytes of state, bytes per second to disk and hours between failures of one GPU."""
    if update_seconds <= 0:
        raise PlanError("the time of an update is not known")
    stall, write = state / ranks / _COPY, state / disk
    between = hours_between_failures * 3600 / ranks
    by_young, by_daly = young(stall, between), daly(stall, between)
    chosen = min(max(by_daly, write), max(_LONGEST, write))
    lost = stall / chosen + chosen / 2 / between
    steps = max(1, round(chosen / update_seconds))
    return CheckpointInterval(state, stall, write, between, by_young, by_daly, chosen, steps, lost)


def interval_section(
    interval: CheckpointInterval, recipe: Recipe, update_seconds: float, hours: float, disk: float
) -> PageSection:
    """The interval and what it follows from, as rows."""
    section = PageSection("checkpoints", "Checkpoints")
    text = format_bytes(interval.state)
    section.add("state", "size", interval.state, text, "weights and optimizer state, all GPUs together")
    how = f"size / GPUs / {format_bytes(_COPY)}/s to the host, assumed; writing goes on in the background"
    section.add("stall", "stall by a save", interval.stall, format_hours(interval.stall), how)
    how = f"size / {format_bytes(disk)}/s (--disk)"
    section.add("write", "time to write", interval.write, format_hours(interval.write), how)
    how = f"{hours:,.0f} h of one GPU (--mtbf-hours) / GPUs"
    text = format_hours(interval.between_failures)
    section.add("between_failures", "between failures", interval.between_failures, text, how)
    how = "Young: sqrt(2 x stall x time between failures)"
    section.add("young", "best interval", interval.young, format_hours(interval.young), how)
    how = "Daly: Young's with its higher-order terms, less the stall"
    section.add("daly", "more exactly", interval.daly, format_hours(interval.daly), how)
    how = f"Daly's, at least the time to write, at most an hour: every {format_hours(interval.chosen)}"
    section.add("every", "checkpoints.every", interval.steps, f"{interval.steps:,}", how)
    how = "stall / interval + interval / 2 / time between failures"
    section.add("lost", "time lost", interval.lost, f"{100 * interval.lost:.2g} %", how)
    section.lines = [
        f"checkpoints.every={interval.steps} checkpoints.seconds={max(1, round(interval.chosen))}",
    ]
    if min(recipe.checkpoints.every, recipe.checkpoints.seconds / update_seconds) > 2 * interval.steps:
        section.remarks.append("The recipe's own interval is more than twice as long.")
    return section

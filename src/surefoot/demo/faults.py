"""The faults of the demo, planted through wrappers: the engine itself is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from surefoot.train.build import RunParts

DAMAGED_UPDATES = 3
"""Consecutive updates before which the moments are damaged."""
IGNORE_INDEX = -100
"""A target that does not count."""


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """When it occurs, as a fraction of the run, its label in the plot, and its description."""

    after: float
    name: str
    description: str


FAULTS = {
    "moments": PlantedFault(
        0.31,
        "moments / 1,000,000",
        "damaged moments: Adam's second moments are divided by 1,000,000 before three consecutive updates",
    ),
    "rate": PlantedFault(0.56, "lr x 10", "the lr is ten times that of the schedule, from here to the end"),
    "poison": PlantedFault(
        0.84,
        "poisoned batch",
        "a poisoned batch: one text has no target that counts, so its loss weights are 0 / 0 = NaN",
    ),
}


def fault_steps(steps: int) -> dict[str, int]:
    """The update before which each fault occurs."""
    return {name: int(fault.after * steps) for name, fault in FAULTS.items()}


def token_weights(targets: Tensor) -> Tensor:
    """The weight of each token in the mean of its text."""
    counts = targets != IGNORE_INDEX
    return counts / counts.sum(1, keepdim=True)


def mean_of_texts(model: Callable[[Tensor], Tensor], batch: Mapping[str, Any]) -> Tensor:
    """A typical loss: the mean over each text, then over the texts; batches may bring the token weights."""
    targets = batch["targets"]
    weights = batch["weights"] if "weights" in batch else token_weights(targets)
    losses = F.cross_entropy(model(batch["inputs"]).transpose(1, 2), targets.clamp(min=0), reduction="none")
    return (losses * weights).sum(1).mean()


class PoisonedLoader:
    """Adds token weights to the batches of a loader, and breaks one batch the way real data breaks."""

    def __init__(self, batches: Iterable[Any], poisoned: int) -> None:
        self._batches, self._poisoned = batches, poisoned
        self._fetched = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            targets = batch["targets"]
            if self._fetched == self._poisoned:
                targets = targets.clone()
                targets[3] = IGNORE_INDEX
            self._fetched += 1
            yield batch | {"targets": targets, "weights": token_weights(targets)}


def plant(parts: RunParts, faults: Mapping[str, int], update: int) -> None:
    """Plant the two faults that are not in the data: damaged moments, and an lr that is too high."""
    if "moments" in faults and faults["moments"] <= update < faults["moments"] + DAMAGED_UPDATES:
        for optimizer in parts.optimizers:
            for state in optimizer.state.values():
                state["exp_avg_sq"] *= 1e-6
    if "rate" in faults and update >= faults["rate"]:
        for optimizer, schedule in zip(parts.optimizers, parts.schedules, strict=True):
            for group, lr in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = 10 * lr

"""What goes wrong in the demo, planted from outside: the engine knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from surefoot.train.build import Parts

DAMAGED = 3
"""Updates in a row before which the moments are damaged."""
IGNORED = -100
"""A target that does not count."""


@dataclass(frozen=True, slots=True)
class Fault:
    """After which share of the updates it comes, its name in the picture, and what it is."""

    after: float
    name: str
    words: str


FAULTS = {
    "moments": Fault(
        0.31,
        "moments / 1,000,000",
        "damaged moments: Adam's second ones are divided by 1,000,000, three updates in a row",
    ),
    "rate": Fault(0.56, "rate x 10", "a rate ten times that of the schedule, from here to the end"),
    "poison": Fault(
        0.84,
        "poisoned batch",
        "a poisoned batch: in one text nothing counts, so its weights are 0 / 0, not numbers",
    ),
}


def planned(steps: int) -> dict[str, int]:
    """Before which update of the loop each fault comes."""
    return {name: int(fault.after * steps) for name, fault in FAULTS.items()}


def weights_of(targets: Tensor) -> Tensor:
    """How much each token counts in the mean of its text."""
    counts = targets != IGNORED
    return counts / counts.sum(1, keepdim=True)


def mean_of_texts(model: Callable[[Tensor], Tensor], batch: Mapping[str, Any]) -> Tensor:
    """A loss as people write it: the mean of each text, then of the texts; batches may bring the weights of tokens."""
    targets = batch["targets"]
    weights = batch["weights"] if "weights" in batch else weights_of(targets)
    each = F.cross_entropy(model(batch["inputs"]).transpose(1, 2), targets.clamp(min=0), reduction="none")
    return (each * weights).sum(1).mean()


class Weighed:
    """The loader as the loop sees it: batches bring their weights, and one of them is broken the way real data is."""

    def __init__(self, batches: Iterable[Any], poisoned: int) -> None:
        self._batches, self._poisoned = batches, poisoned
        self._fetched = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            targets = batch["targets"]
            if self._fetched == self._poisoned:
                targets = targets.clone()
                targets[3] = IGNORED
            self._fetched += 1
            yield batch | {"targets": targets, "weights": weights_of(targets)}


def plant(parts: Parts, faults: Mapping[str, int], update: int) -> None:
    """The two faults that are none of the data, before an update: a damaged optimizer, and a schedule gone wrong."""
    if "moments" in faults and faults["moments"] <= update < faults["moments"] + DAMAGED:
        for optimizer in parts.optimizers:
            for state in optimizer.state.values():
                state["exp_avg_sq"] *= 1e-6
    if "rate" in faults and update >= faults["rate"]:
        for optimizer, schedule in zip(parts.optimizers, parts.schedules, strict=True):
            for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = 10 * rate

"""The course of a run: loss, evaluation, norm, rate and scale over steps; what judgement and pictures work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trace:
    """One quantity over the run."""

    name: str
    """The column it came from."""
    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)


def nothing() -> Trace:
    return Trace("", np.empty(0), np.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a run did, in order of the log; a trace that the log does not have is empty."""

    loss: Trace = field(default_factory=nothing)
    """Of training, or the evaluation's where no other was logged."""
    eval_loss: Trace = field(default_factory=nothing)
    norm: Trace = field(default_factory=nothing)
    rate: Trace = field(default_factory=nothing)
    scale: Trace = field(default_factory=nothing)
    """The loss scale of float16."""
    others: Mapping[str, Trace] = field(default_factory=dict)
    """By role: accuracy, eval_accuracy, reward, speed, memory, skipped; `rival:NAME` for losses of a game."""
    unit: str = "step"
    """What the steps count: step, epoch, or point (a loss) where the log counts nothing."""
    notes: tuple[str, ...] = ()

    def used(self) -> dict[str, str]:
        """Role to column, for those that were found."""
        named = {"loss": self.loss, "eval_loss": self.eval_loss, "norm": self.norm, "rate": self.rate}
        named |= {"scale": self.scale} | dict(self.others)
        return {role: trace.name for role, trace in named.items() if len(trace)}

"""The course of a run: loss, evaluation, norm, rate and scale over steps; what judgement and pictures work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over the run."""

    name: str
    """The column it came from."""
    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)


def empty_series() -> Series:
    return Series("", np.empty(0), np.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """What a run did, in order of the log; a trace that the log does not have is empty."""

    loss: Series = field(default_factory=empty_series)
    """Of training, or the evaluation's where no other was logged."""
    eval_loss: Series = field(default_factory=empty_series)
    grad_norm: Series = field(default_factory=empty_series)
    lr: Series = field(default_factory=empty_series)
    loss_scale: Series = field(default_factory=empty_series)
    """The loss scale of float16."""
    others: Mapping[str, Series] = field(default_factory=dict)
    """By role: accuracy, eval_accuracy, reward, speed, memory, skipped; `rival:NAME` for losses of a game."""
    unit: str = "step"
    """What the steps count: step, epoch, or point (a loss) where the log counts nothing."""
    notes: tuple[str, ...] = ()

    def columns_used(self) -> dict[str, str]:
        """Role to column, for those that were found."""
        named = {"loss": self.loss, "eval_loss": self.eval_loss, "norm": self.grad_norm, "rate": self.lr}
        named |= {"scale": self.loss_scale} | dict(self.others)
        return {role: trace.name for role, trace in named.items() if len(trace)}

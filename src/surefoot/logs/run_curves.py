"""The curves of a run: loss, eval loss, gradient norm, learning rate and loss scale over steps."""

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
    """The curves of one run, in the order of the log; a curve that was not logged is empty."""

    loss: Series = field(default_factory=empty_series)
    """The training loss, or the eval loss if no other was logged."""
    eval_loss: Series = field(default_factory=empty_series)
    grad_norm: Series = field(default_factory=empty_series)
    lr: Series = field(default_factory=empty_series)
    loss_scale: Series = field(default_factory=empty_series)
    """The float16 loss scale."""
    others: Mapping[str, Series] = field(default_factory=dict)
    """By role: accuracy, eval_accuracy, reward, speed, memory, skipped; `rival:NAME` for adversarial losses."""
    unit: str = "step"
    """The unit of the steps: step, epoch, or point (the n-th loss) if the log has no counter."""
    notes: tuple[str, ...] = ()

    def columns_used(self) -> dict[str, str]:
        """Role to column name, for the curves that were found; the keys are part of the JSON output."""
        named = {"loss": self.loss, "eval_loss": self.eval_loss, "norm": self.grad_norm, "rate": self.lr}
        named |= {"scale": self.loss_scale} | dict(self.others)
        return {role: series.name for role, series in named.items() if len(series)}

"""The course of a run: loss, evaluation, norm, rate and scale over steps, found in a table by their meaning."""

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
    """By role: accuracy, reward, seconds, tokens_per_second, memory, skipped..."""
    unit: str = "step"
    """What the steps count: step, epoch, or row where the log counts nothing."""

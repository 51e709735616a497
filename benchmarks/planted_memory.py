"""Plants out-of-memory errors in a recipe's run: a limit on the samples of a micro-batch, wherever one is wanted.

The environment variable SUREFOOT_PLANTED_MEMORY plants them in another process: WHERE:SAMPLES:FROM:TO, such as
backward:4:10:20 for more than 4 samples in backward while 10 to 19 updates are made; several are separated by commas.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VARIABLE = "SUREFOOT_PLANTED_MEMORY"
PLACES = ("forward", "backward", "step", "half step", "evaluation")


@dataclass(frozen=True, slots=True)
class Limit:
    """Memory for so many samples at a time, while these updates are made; in an optimizer's step there is none."""

    where: str
    samples: int
    first: int = 0
    end: int = 1 << 62
    times: int = 1 << 62
    """How often it takes effect."""


@dataclass(slots=True)
class Plant:
    """The limits in force in this process."""

    limits: list[Limit] = field(default_factory=list)
    updates: int = 0
    """Updates made so far, as the optimizer counts them."""
    hits: list[tuple[str, int, int]] = field(default_factory=list)
    """Place, samples and update of each error."""

    def check(self, where: str, samples: int) -> None:
        """Raise an out-of-memory error where a limit is exceeded."""
        for limit in self.limits:
            due = limit.where == where and limit.first <= self.updates < limit.end and samples > limit.samples
            if due and sum(hit[0] == where and hit[2] >= limit.first for hit in self.hits) < limit.times:
                self.hits.append((where, samples, self.updates))
                raise torch.OutOfMemoryError(f"planted: no memory for {samples} samples {where}")


def _from_environment() -> list[Limit]:
    given = [text.split(":") for text in os.environ.get(VARIABLE, "").split(",") if text]
    return [Limit(where, int(samples), int(first), int(end)) for where, samples, first, end in given]


PLANT = Plant(_from_environment())


class _NoMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, samples: int) -> Tensor:
        ctx.samples = samples
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        PLANT.check("backward", ctx.samples)
        return grads[0], None


def sum_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """The summed loss of a language model, and the number of targets."""
    samples = len(batch["inputs"])
    PLANT.check("forward" if torch.is_grad_enabled() else "evaluation", samples)
    loss = model(batch["inputs"], batch["targets"])
    return (_NoMemoryInBackward.apply(loss, samples) if torch.is_grad_enabled() else loss), batch["count"]  # type: ignore[return-value]


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean loss of a classifier on a tuple of inputs and labels."""
    x, y = batch
    PLANT.check("forward" if torch.is_grad_enabled() else "evaluation", len(x))
    loss = nn.functional.cross_entropy(model(x), y)
    return _NoMemoryInBackward.apply(loss, len(x)) if torch.is_grad_enabled() else loss  # type: ignore[return-value]


def _adamw_step(optimizer: torch.optim.AdamW, closure: Any) -> Any:
    """The step of torch's AdamW without torch's hooks, which run around the step of the class below."""
    step: Any = torch.optim.AdamW.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step(optimizer, closure)


class AdamW(torch.optim.AdamW):
    """AdamW that runs out of memory before it has changed anything, or half-way through its parameter groups."""

    def step(self, closure: Any = None) -> Any:
        PLANT.updates = max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)
        PLANT.check("step", 1)
        groups = self.param_groups
        try:
            if any(limit.where == "half step" for limit in PLANT.limits):
                self.param_groups = groups[:1]
                _adamw_step(self, closure)
                PLANT.check("half step", 1)
                self.param_groups = groups[1:]
            result = _adamw_step(self, closure)
        finally:
            self.param_groups = groups
        PLANT.updates += 1
        return result

"""The proof of a resume: a batch that is saved with the loss it had, and must have that loss again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from surefoot.checkpoint.batch_copy import kept
from surefoot.checkpoint.side_effect_free import quietly

SAME = 1e-5
"""Relative difference of two losses of one machine that is put down to kernels whose sums come in any order."""
ELSEWHERE = 1e-2
"""The same where another device, another torch or another number of processes has worked it out."""
StepFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Probed:
    """A batch and its loss, still on the device."""

    batch: Any
    loss: Tensor
    seconds: float
    """What the training had to wait for it, on the host."""

    def told(self) -> dict[str, Any]:
        """What is saved; waits for the device."""
        return {"batch": self.batch, "loss": self.loss.item(), "where": where(self.loss.device)}


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of running the batch again."""

    verdict: str
    """equal, close, differs or none."""
    loss: float = math.nan
    was: float = math.nan
    tolerance: float = 0.0
    why: str = ""
    """There is none: why."""

    @property
    def words(self) -> str:
        losses = f"the saved batch had loss {self.was:.9g} and has {self.loss:.9g}"
        return {
            "none": self.why,
            "equal": f"the saved batch has the loss it had, {self.was:.9g}, to the bit",
            "close": f"{losses}, within {self.tolerance:g} of it",
            "differs": f"{losses}, more than {self.tolerance:g} of it apart: has the model's code changed since, or "
            "step_fn, or what surrounds them?",
        }[self.verdict]


class ReplayCheck:
    """Runs `step_fn` on the last watched batch when a run is saved, and on a saved one when it is resumed."""

    def __init__(self, model: nn.Module, step_fn: StepFn | None, *, every: int = 1) -> None:
        self._model, self._step_fn, self._every = model, step_fn, every
        self._batch: Any = None
        self._saves = 0
        self._failed = ""
        self.off = "no step_fn was given" if step_fn is None else "" if every else "switched off by probe_every=0"
        """Why no batch is saved, if none is."""

    def failed(self) -> str:
        """Why no batch is saved any more, once."""
        why, self._failed = self._failed, ""
        return why

    def watched(self, batch: Any) -> None:
        """The loop has a loss for this batch."""
        if not self.off:
            self._batch = batch

    def take(self, instead: Mapping[int, Tensor] | None = None) -> Probed | None:
        """The last batch and its loss with the weights as they are now; costs one forward pass, and no wait."""
        if self.off or self._batch is None:
            return None
        self._saves += 1
        if (self._saves - 1) % self._every or (
            instead and any(isinstance(m, FSDPModule) for m in self._model.modules())
        ):
            return None  # spread weights cannot be used between a forward pass and its backward
        began = time.perf_counter()
        try:
            batch = kept(self._batch)
            loss = self._run(batch, instead)
        except Exception as error:  # of the user's own function: training goes on, unproven
            self._failed = self.off = (
                f"the last batch could not be run again by step_fn: {type(error).__name__}: {error}"
            )
            self._batch = None
            return None
        return Probed(batch, loss, time.perf_counter() - began)

    def prove(self, told: Any, *, same_world: bool = True) -> Proof:
        """Run a saved batch and compare."""
        if not isinstance(told, Mapping) or "loss" not in told:
            return Proof("none", why="the checkpoint has no batch to run again")
        if self._step_fn is None:
            return Proof("none", why="no step_fn was given to run the saved batch with")
        was = float(told["loss"])
        try:
            found = self._run(told["batch"])
        except Exception as error:
            return Proof("none", why=f"step_fn failed on the saved batch: {type(error).__name__}: {error}")
        loss = found.item()
        tolerance = SAME if same_world and told.get("where") == where(found.device) else ELSEWHERE
        if loss == was or (math.isnan(loss) and math.isnan(was)):
            return Proof("equal", loss, was)
        close = abs(loss - was) <= tolerance * max(abs(was), 1e-12)
        return Proof("close" if close else "differs", loss, was, tolerance)

    def _run(self, batch: Any, instead: Mapping[int, Tensor] | None = None) -> Tensor:
        assert self._step_fn is not None
        with quietly(self._model, instead):
            loss = self._step_fn(self._model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"it must return the loss, a tensor with one number, not {type(loss).__name__}")
        return loss.detach().clone()


def where(device: torch.device) -> dict[str, Any]:
    """What a loss depends on to the bit, besides the state."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return {"device": name, "torch": str(torch.__version__), "cuda": torch.version.cuda, "threads": threads}

"""Checks a resume by replay: a batch is saved with its loss, and must have the same loss after loading."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from surefoot.checkpoint.side_effect_free import reproducible

TOLERANCE = 1e-5
"""Relative difference of two losses on one machine that nondeterministic summation order explains."""
TOLERANCE_ELSEWHERE = 1e-2
"""The same if another device, another torch or another number of ranks computed the saved loss."""
MAX_BATCH_BYTES = 1 << 24
"""Bytes of a batch that are saved; of a larger batch only the first samples."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
StepFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """A batch and its loss, still on the device."""

    batch: Any
    loss: Tensor
    seconds: float
    """Host seconds that training waited for it."""

    def as_dict(self) -> dict[str, Any]:
        """What is saved; waits for the device."""
        return {"batch": self.batch, "loss": self.loss.item(), "where": environment(self.loss.device)}


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of running the saved batch again."""

    verdict: str
    """equal, close, differs or none."""
    loss: float = math.nan
    saved_loss: float = math.nan
    tolerance: float = 0.0
    reason: str = ""
    """Why there is no result, if there is none."""

    @property
    def message(self) -> str:
        losses = f"the saved batch had loss {self.saved_loss:.9g} and now has {self.loss:.9g}"
        return {
            "none": self.reason,
            "equal": f"the saved batch has its saved loss, {self.saved_loss:.9g}, bit for bit",
            "close": f"{losses}, within the tolerance of {self.tolerance:g}",
            "differs": f"{losses}, a relative difference above {self.tolerance:g}: has the model's code or step_fn"
            " changed since, or anything they use?",
        }[self.verdict]


class ReplayCheck:
    """Runs `step_fn` on the last watched batch when a run is saved, and on the saved batch when it is resumed."""

    def __init__(self, model: nn.Module, step_fn: StepFn | None, *, every: int = 1) -> None:
        self._model, self._step_fn, self._every = model, step_fn, every
        self._batch: Any = None
        self._saves = 0
        self.failure = ""
        """Why batches are no longer saved, until that is reported."""
        self.disabled_reason = (
            "no step_fn was given" if step_fn is None else "" if every else "switched off by probe_every=0"
        )
        """Why no batch is saved; empty if batches are saved."""

    def observe(self, batch: Any) -> None:
        """Remember the batch that the loop just computed a loss for; not called while there is a `disabled_reason`."""
        self._batch = batch

    def take(self, buffers: Mapping[int, Tensor] | None = None) -> ReplayBatch | None:
        """The last batch and its loss with the current weights; costs one forward pass and does not synchronise."""
        if self.disabled_reason or self._batch is None:
            return None
        self._saves += 1
        if (self._saves - 1) % self._every or (
            buffers and any(isinstance(m, FSDPModule) for m in self._model.modules())
        ):
            return None  # sharded weights cannot be used between a forward pass and its backward pass
        began = time.perf_counter()
        try:
            batch = copy_batch(self._batch)
            loss = self._run(batch, buffers)
        except Exception as error:  # in the user's function: training continues without the check
            self.failure = self.disabled_reason = (
                f"step_fn could not run the last batch again: {type(error).__name__}: {error}"
            )
            self._batch = None
            return None
        return ReplayBatch(batch, loss, time.perf_counter() - began)

    def compare(self, saved: Any, *, same_world: bool = True) -> ReplayResult:
        """Run the saved batch and compare its loss with the saved one."""
        if not isinstance(saved, Mapping) or "loss" not in saved:
            return ReplayResult("none", reason="the checkpoint has no batch to replay")
        if self._step_fn is None:
            return ReplayResult("none", reason="no step_fn was given to replay the saved batch with")
        saved_loss = float(saved["loss"])
        try:
            result = self._run(saved["batch"])
        except Exception as error:
            return ReplayResult("none", reason=f"step_fn failed on the saved batch: {type(error).__name__}: {error}")
        loss = result.item()
        same_environment = same_world and saved.get("where") == environment(result.device)
        tolerance = TOLERANCE if same_environment else TOLERANCE_ELSEWHERE
        if loss == saved_loss or (math.isnan(loss) and math.isnan(saved_loss)):
            return ReplayResult("equal", loss, saved_loss)
        close = abs(loss - saved_loss) <= tolerance * max(abs(saved_loss), 1e-12)
        return ReplayResult("close" if close else "differs", loss, saved_loss, tolerance)

    def _run(self, batch: Any, buffers: Mapping[int, Tensor] | None = None) -> Tensor:
        assert self._step_fn is not None
        with reproducible(self._model, buffers):
            loss = self._step_fn(self._model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"step_fn must return the loss, a tensor with one element, not {type(loss).__name__}")
        return loss.detach().clone()


def environment(device: torch.device) -> dict[str, Any]:
    """What a loss depends on, bit for bit, besides the state."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return {"device": name, "torch": str(torch.__version__), "cuda": torch.version.cuda, "threads": threads}


def copy_batch(batch: Any, max_bytes: int = MAX_BATCH_BYTES) -> Any:
    """Copy a batch into plain dicts, lists and tuples, cut to `max_bytes`; raises TypeError, ValueError."""
    size = sum(t.nbytes for t in _tensors(batch) if isinstance(t, np.ndarray) or t.layout is torch.strided)
    if size > max_bytes:
        batch = _first_samples(batch, size, max_bytes)
    return _copied(batch)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
            raise TypeError(f"a {type(value).__name__} of layout {value.layout} cannot be saved in a checkpoint")
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return _map_parts(value, _copied)


def _map_parts(value: Any, transform: Callable[[Any], Any]) -> Any:
    """The same nesting in plain containers, with `transform` applied to each part."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {k: transform(v) for k, v in value.items()}
    if isinstance(value, list):
        return [transform(v) for v in value]
    if isinstance(value, tuple):
        return tuple(transform(v) for v in value)
    raise TypeError(f"a {type(value).__name__} inside the batch cannot be saved in a checkpoint")


def _tensors(value: Any) -> Iterator[Tensor | np.ndarray]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)


def _first_samples(batch: Any, size: int, max_bytes: int) -> Any:
    """The first samples of a batch in which the first dimension of all tensors has the same length."""
    lengths = {t.shape[0] for t in _tensors(batch) if t.ndim}
    samples = lengths.pop() if len(lengths) == 1 else 0
    count = samples * max_bytes // size
    if count < 1:
        raise ValueError(f"the batch takes {size:,} bytes, more than {max_bytes:,}, and cannot be cut into samples")

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor | np.ndarray):
            return value[:count] if value.ndim else value
        texts = isinstance(value, list | tuple) and len(value) == samples and next(_tensors(value), None) is None
        return value[:count] if texts else _map_parts(value, cut)

    return cut(batch)

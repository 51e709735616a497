"""One forward and backward pass of a step, without a trace, or with every operation traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.checkpoint.tree import tensors_in
from surefoot.measure.layout import to_local
from surefoot.origin.call_site import CallSites, plain_name
from surefoot.origin.op_trace import OpTrace, TracedOp, is_finite, no_probes

StepFn = Callable[[nn.Module, Any], Tensor]


class LocateFailed(Exception):
    """The step could not be run again; the message says why."""


@dataclass(frozen=True, slots=True)
class Passes:
    """A forward and backward pass that was run with probes."""

    trace: OpTrace
    sink: TracedOp | None
    """What wrote the loss or gradient that is not finite; None where all are finite."""


def loss_of(model: nn.Module, batch: Any, step_fn: StepFn) -> Tensor:
    """The loss of a batch; raises `LocateFailed`."""
    torch.clear_autocast_cache()
    try:
        loss = step_fn(model, batch)
    except Exception as error:  # of the user's model, or out of memory
        raise LocateFailed(f"step_fn failed: {type(error).__name__}: {error}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise LocateFailed(f"step_fn must return the loss, a tensor with one element, not {type(loss).__name__}")
    return loss.reshape(())


def gradients(loss: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients, without writing them to the parameters: no hook on their accumulation is called.

    Raises `LocateFailed`.
    """
    if not loss.requires_grad:
        return []
    try:
        if _has_reentrant_checkpoint(loss):  # these work with `backward` alone; the gradients are put back later
            loss.backward()
            grads = [p.grad for p in params]
            for p in params:
                p.grad = None
        else:
            grads = torch.autograd.grad(loss, params, allow_unused=True)
    except Exception as error:
        raise LocateFailed(f"backward failed: {type(error).__name__}: {error}") from error
    return [g for g in grads if g is not None]


def _has_reentrant_checkpoint(loss: Tensor) -> bool:
    """Whether activation checkpointing of the kind `use_reentrant=True` was used."""
    seen, waiting = set[Any](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [further for further, _ in node.next_functions]
    return False


def run_passes(model: nn.Module, batch: Any, step_fn: StepFn, loss_factor: float, *, wanted_node: int = -1) -> Passes:
    """Run a batch forward and, where its loss is finite, backward; with `wanted_node`, forward alone."""
    params = [p for p in model.parameters() if p.requires_grad]
    with CallSites(model) as sites, OpTrace(sites, wanted_node=wanted_node) as trace:
        with no_probes():
            _add_sources(trace, model, batch)
        loss = loss_of(model, batch, step_fn)
        with no_probes():
            finite = is_finite(loss.detach())
        if not finite or wanted_node >= 0:
            return Passes(trace, None if finite else _sink(trace, loss))
        trace.in_backward = True
        grads = gradients(loss if loss_factor == 1.0 else loss * loss_factor, params)
        with no_probes():
            bad = next((g for g in grads if not is_finite(to_local(g.detach()))), None)
            return Passes(trace, None if bad is None else _sink(trace, bad))


def _sink(trace: OpTrace, tensor: Tensor) -> TracedOp:
    return trace.writer_of(tensor) or TracedOp(-1, "", None, has_nan=True, tensor="a tensor")


def _add_sources(trace: OpTrace, model: nn.Module, batch: Any) -> None:
    """Note what is not finite before the first operation."""
    for k, tensor in enumerate(tensors_in(batch)):
        if tensor.is_floating_point():
            trace.add_source(tensor, f"tensor {k} of the batch", "batch")
    for name, p in model.named_parameters():
        trace.add_source(p, plain_name(name), "weights")
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            trace.add_source(buffer, plain_name(name), "buffer")

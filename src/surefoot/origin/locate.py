"""Runs a step once with probes and names the operation that made its first non-finite value."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.checkpoint.rng import RngStates, get_rng_states, set_rng_states
from surefoot.measure.layout import to_local
from surefoot.origin.call_site import CallSites, plain_name
from surefoot.origin.classify import kind_of
from surefoot.origin.op_trace import OpTrace, TracedOp, is_finite, no_probes, producers, tensors_in
from surefoot.origin.untouched import devices_of, untouched
from surefoot.origin_record import Origin, OriginKind

StepFn = Callable[[nn.Module, Any], Tensor]


class LocateFailed(Exception):
    """The step could not be run with probes; the message says why."""


def locate(model: nn.Module, batch: Any, step_fn: StepFn) -> Origin:
    """Find the operation that makes the loss or a gradient of this batch non-finite.

    Runs `step_fn(model, batch) -> loss` and its backward pass with probes. Model, optimizer, gradients, buffers and
    random states are left as they are. An `Origin` is true where something was found; `print(origin)` says what.

    >>> model = torch.nn.Linear(2, 1)
    >>> origin = locate(model, torch.zeros(3, 2), lambda model, batch: (model(batch) * 0).log().sum())
    >>> origin.kind, origin.operation
    (<OriginKind.LOG_OF_ZERO: 'log_of_zero'>, 'log')
    """
    return locate_in_step(model, [batch], step_fn)


def locate_in_step(
    model: nn.Module,
    batches: Sequence[Any],
    step_fn: StepFn,
    *,
    rng_states: RngStates | None = None,
    loss_factor: float = 1.0,
) -> Origin:
    """The same for a step of several micro-batches, with the random states from before its first forward pass."""
    began = time.perf_counter()
    forwards, origin = 0, Origin(kind=OriginKind.NONE)
    with untouched(model):
        if rng_states is not None:
            set_rng_states(rng_states)
        for k, batch in enumerate(batches):
            before = get_rng_states(devices_of(model))
            passes = run_passes(model, batch, step_fn, loss_factor)
            forwards += 1
            if passes.sink is None:
                continue
            first = producers(passes.sink)[0]
            forward = None
            if first.backward and first.node in passes.trace.sites_by_node:
                set_rng_states(before)
                forward = run_passes(model, batch, step_fn, loss_factor, wanted_node=first.node).trace.wanted
                forwards += 1
            origin = replace(describe(first, forward), microbatch=k, num_microbatches=len(batches))
            break
    return replace(origin, forwards=forwards, seconds=round(time.perf_counter() - began, 3))


@dataclass(frozen=True, slots=True)
class Passes:
    """A forward and backward pass that was run with probes."""

    trace: OpTrace
    sink: TracedOp | None
    """What wrote the loss or gradient that is not finite; None where all are finite."""


def run_passes(model: nn.Module, batch: Any, step_fn: StepFn, loss_factor: float, *, wanted_node: int = -1) -> Passes:
    """Run a batch forward and, where its loss is finite, backward; with `wanted_node`, forward alone."""
    params = [p for p in model.parameters() if p.requires_grad]
    with CallSites(model) as sites, OpTrace(sites, wanted_node=wanted_node) as trace:
        with no_probes():
            _add_sources(trace, model, batch)
        loss = _loss_of(model, batch, step_fn)
        with no_probes():
            finite = is_finite(loss.detach())
        if not finite or wanted_node >= 0:
            return Passes(trace, None if finite else _sink(trace, loss))
        trace.in_backward = True
        grads = _grads_of(loss if loss_factor == 1.0 else loss * loss_factor, params)
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


def _loss_of(model: nn.Module, batch: Any, step_fn: StepFn) -> Tensor:
    try:
        loss = step_fn(model, batch)
    except Exception as error:
        raise LocateFailed(f"step_fn failed: {type(error).__name__}: {error}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise LocateFailed(f"step_fn must return the loss, a tensor with one element, not {type(loss).__name__}")
    return loss


def _grads_of(loss: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    """The gradients, without writing them to the parameters: nothing that hangs on them is called."""
    if not loss.requires_grad:
        return []
    try:
        return [g for g in torch.autograd.grad(loss.reshape(()), params, allow_unused=True) if g is not None]
    except Exception as error:
        raise LocateFailed(f"backward failed: {type(error).__name__}: {error}") from error


def describe(op: TracedOp, forward: TracedOp | None) -> Origin:
    """The origin in the user's words; `forward` is the operation whose backward pass it was made in."""
    site = op.site if op.site is not None or forward is None else forward.site
    kind = kind_of(op, forward)
    if op.source_kind or not op.name:
        return Origin(kind=kind, tensor=op.tensor, inputs=op.outputs)
    named = forward if forward is not None else op
    function = "" if named.site is None else named.site.function
    return Origin(
        kind=kind,
        operation=function or operation_name(named.name),
        aten=op.name,
        module="" if site is None else site.module,
        module_type="" if site is None else site.module_type,
        backward=op.backward,
        file="" if site is None else site.file,
        line=0 if site is None else site.line,
        code="" if site is None else site.code,
        inputs=op.inputs if forward is None else (*forward.inputs, *op.inputs),
        outputs=op.outputs,
    )


def operation_name(aten: str) -> str:
    """The name a PyTorch user knows: `layer_norm` for `native_layer_norm`."""
    if "scaled_dot_product" in aten:
        return "scaled_dot_product_attention"
    name = aten.strip("_").removeprefix("native_").removeprefix("cudnn_").removeprefix("linalg_vector_")
    return RENAMED.get(name, name)


RENAMED = {
    "nll_loss_forward": "nll_loss",
    "addmm": "linear",
    "mm": "matmul",
    "bmm": "matmul",
    "convolution": "conv",
    "to_copy": "to",
}
"""What PyTorch's own operations are called in Python."""

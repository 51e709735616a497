"""Runs a step once with probes and names the operation that made its first non-finite value."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from surefoot.checkpoint.rng import RngStates, get_rng_states, set_rng_states
from surefoot.origin.classify import kind_of
from surefoot.origin.find_samples import SampleSearch, rows_of
from surefoot.origin.op_trace import OpTrace, TracedOp, producers
from surefoot.origin.passes import LocateFailed, StepFn, run_passes
from surefoot.origin.untouched import NEEDS_RANKS, devices_of, needs_ranks, untouched
from surefoot.origin_record import Origin, OriginKind


def locate(model: nn.Module, batch: Any, step_fn: StepFn, *, samples: bool = True) -> Origin:
    """Find the operation that makes the loss or a gradient of this batch non-finite, and the samples to blame.

    Runs `step_fn(model, batch) -> loss` and its backward pass with probes; then, unless `samples=False`, parts of the
    batch, in at most 2 log2(samples) forward passes. Model, optimizer, gradients, buffers and random states are left
    as they are. An `Origin` is true where something was found; `print(origin)` says what.

    >>> import torch
    >>> origin = locate(torch.nn.Linear(2, 1), torch.zeros(3, 2), lambda model, batch: (model(batch) * 0).log().sum())
    >>> origin.kind, origin.operation
    (<OriginKind.LOG_OF_ZERO: 'log_of_zero'>, 'log')
    """
    return locate_in_step(model, [batch], step_fn, samples=samples)


def locate_in_step(
    model: nn.Module,
    batches: Sequence[Any],
    step_fn: StepFn,
    *,
    rng_states: RngStates | None = None,
    loss_factor: float = 1.0,
    samples: bool = True,
    deadline: float = math.inf,
) -> Origin:
    """The same for a step of several micro-batches, with the random states from before its first forward pass; after
    `deadline` seconds no further pass is begun."""
    began = time.perf_counter()
    forwards, origin = 0, Origin(kind=OriginKind.NONE)

    def late() -> bool:
        return time.perf_counter() - began > deadline

    if needs_ranks(model):
        raise LocateFailed(NEEDS_RANKS)
    with untouched(model):
        if rng_states is not None:
            set_rng_states(rng_states)
        for k, batch in enumerate(batches):
            before = get_rng_states(devices_of(model))
            passes = run_passes(model, batch, step_fn, loss_factor)
            forwards += 1
            if passes.sink is None:
                if late():
                    break
                continue
            first = producers(passes.sink)[0]
            forward = forward_of(first, passes.trace)
            if first.backward and first.node in passes.trace.sites_by_node and not late():
                set_rng_states(before)
                again = run_passes(model, batch, step_fn, loss_factor, wanted_node=first.node)
                forward = again.trace.wanted or forward
                forwards += 1
            origin = replace(describe(first, forward), microbatch=k, num_microbatches=len(batches))
            if samples and origin.kind not in NOT_BY_SAMPLE and not late():
                search = SampleSearch(
                    model,
                    batch,
                    step_fn,
                    before,
                    backward=origin.backward,
                    loss_factor=loss_factor,
                    out_of_time=late,
                )
                origin = with_samples(origin, search, rows_of(first, search.size))
                forwards += search.forwards
            break
    return replace(origin, forwards=forwards, seconds=round(time.perf_counter() - began, 3))


def locate_large(
    model: nn.Module,
    batches: Sequence[Any],
    step_fn: StepFn,
    *,
    rng_states: RngStates,
    max_norm: float,
    deadline: float,
) -> Origin:
    """The samples of a finite step without which its gradient norm is not above `max_norm`."""
    began = time.perf_counter()
    origin = Origin(kind=OriginKind.NONE, num_microbatches=len(batches))
    forwards = 0
    with untouched(model):
        set_rng_states(rng_states)
        for k, batch in enumerate(batches):
            search = SampleSearch(
                model,
                batch,
                step_fn,
                get_rng_states(devices_of(model)),
                backward=True,
                max_norm=max_norm,
                out_of_time=lambda: time.perf_counter() - began > deadline,
            )
            found = with_samples(Origin(kind=OriginKind.LARGE_SAMPLE, backward=True), search, ())
            forwards += search.forwards
            if found.samples:
                origin = replace(found, microbatch=k, num_microbatches=len(batches))
                break
    return replace(origin, forwards=forwards, seconds=round(time.perf_counter() - began, 3))


NOT_BY_SAMPLE = (OriginKind.WEIGHTS, OriginKind.BUFFER)
"""Every batch is non-finite, whatever samples it holds."""


def with_samples(origin: Origin, search: SampleSearch, candidates: Iterable[int]) -> Origin:
    """The origin with the samples that are to blame, where there are such and parts of the batch can be run."""
    try:
        found = search.run(candidates)
    except LocateFailed:
        return origin
    return replace(origin, samples=found, samples_checked=True)


def forward_of(op: TracedOp, trace: OpTrace) -> TracedOp | None:
    """The forward operation that an operation in backward belongs to, without its values."""
    if not op.backward or op.node not in trace.sites_by_node:
        return None
    name, site = trace.sites_by_node[op.node]
    return TracedOp(-1, name, site)


def describe(op: TracedOp, forward: TracedOp | None) -> Origin:
    """The origin in the user's words; `forward` is the operation whose backward pass it was made in."""
    if op.site is not None:  # in backward: the model's own code is running, such as an autograd.Function
        forward = None
    site = op.site if forward is None else forward.site
    kind = kind_of(op, forward)
    if op.source_kind:
        return Origin(kind=kind, tensor=op.tensor, inputs=op.outputs)
    named = forward if forward is not None else op
    function = "" if named.site is None else named.site.function
    return Origin(
        kind=kind,
        operation=(function or operation_name(named.name)) if op.name else "",
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

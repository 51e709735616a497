"""Runs forward and backward passes that leave no trace: afterwards everything is what it was before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from surefoot.checkpoint.rng import get_rng_states, set_rng_states


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers, modes and random numbers are restored on exit; weights are expected not to change."""
    modules = list(model.modules())
    modes = [(m, m.training) for m in modules]
    owned = [(m, dict(m._buffers)) for m in modules]
    buffers = {id(b): (b, b.detach().clone()) for _, named in owned for b in named.values() if b is not None}
    grads = [(p, p.grad) for p in model.parameters()]
    rng_states = get_rng_states(devices_of(model))
    with ExitStack() as stack:
        for context in _contexts(model, modules):
            stack.enter_context(context)
        for p, _ in grads:
            p.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers.values():
                    buffer.copy_(before)
            for m, named in owned:
                m._buffers.clear()
                m._buffers.update(named)
            for m, training in modes:
                m.training = training
            for p, grad in grads:
                p.grad = grad
            set_rng_states(rng_states)
            torch.clear_autocast_cache()


NEEDS_RANKS = "the model is sharded over ranks, so that one rank cannot run a step alone"


def needs_ranks(model: nn.Module) -> bool:
    """Whether a forward pass needs the other ranks, too."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # a slow import, of which most runs need nothing

    sharded = any(isinstance(m, FSDPModule) for m in model.modules())
    return sharded or any(isinstance(p, DTensor) for p in model.parameters())


def devices_of(model: nn.Module) -> set[torch.device]:
    return {p.device for p in model.parameters() if p.device.type == "cuda"}


def _contexts(model: nn.Module, modules: list[nn.Module]) -> Iterator[Any]:
    yield torch.enable_grad()
    for kind in sorted({"cpu", *(p.device.type for p in model.parameters())} - {"meta"}):
        if torch.is_autocast_enabled(kind):  # the loop's own; step_fn has its own, too
            yield torch.autocast(kind, enabled=False)
    if "torch._dynamo" in sys.modules:
        yield torch.compiler.set_stance("force_eager")
    yield _no_rank_sync(modules)
    yield _no_guard(modules)


@contextmanager
def _no_rank_sync(modules: list[nn.Module]) -> Iterator[None]:
    """DistributedDataParallel neither sends buffers nor prepares to reduce gradients: a rank may run alone."""
    wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
    before = [(m.require_backward_grad_sync, m.require_forward_param_sync) for m in wrappers]
    for m in wrappers:
        m.require_backward_grad_sync = m.require_forward_param_sync = False
    try:
        yield
    finally:
        for m, (grads, params) in zip(wrappers, before, strict=True):
            m.require_backward_grad_sync, m.require_forward_param_sync = grads, params


@contextmanager
def _no_guard(modules: list[nn.Module]) -> Iterator[None]:
    """A guard that is attached to the model does not take these passes for the run's."""
    removed: list[tuple[Any, int, Any]] = []
    for m in modules:
        for hooks in (m._forward_pre_hooks, m._forward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "of_guard", False):
                    removed.append((hooks, key, hook))
    kept = [(hooks, dict(hooks)) for hooks in {id(h): h for h, _, _ in removed}.values()]
    for hooks, key, _ in removed:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:  # in their old order
            hooks.clear()
            hooks.update(before)

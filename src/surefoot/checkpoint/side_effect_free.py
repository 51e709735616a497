"""Evaluates a model without side effects: afterwards modes, buffers and random numbers are what they were before."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from surefoot.checkpoint.rng import get_rng_states, set_rng_states

_SEED = 0


@contextmanager
def side_effect_free(model: nn.Module) -> Iterator[None]:
    """Evaluation mode during training: modes, buffers and random numbers are restored on exit.

    Buffers are restored in place, so that compiled code and CUDA graphs stay valid.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with _modes_and_rng_restored(model):
        model.eval()
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextmanager
def reproducible(model: nn.Module, buffers: Mapping[int, Tensor] | None = None) -> Iterator[None]:
    """Side-effect-free evaluation that gives the same result another time: fixed seed, no autocast, not compiled.

    Modules work on copies of their buffers, so that a pending backward pass is not disturbed; `buffers` has other
    values for some of them, by the `id` of the buffer. Contexts of the caller, such as autocast, have no effect.
    """
    modules = list(model.modules())
    owned = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    ddp = [(m, m.require_forward_param_sync) for m in modules if isinstance(m, DistributedDataParallel)]
    with ExitStack() as stack:
        stack.enter_context(_modes_and_rng_restored(model))
        stack.callback(_restore, modules, owned, ddp)
        for m in modules:
            m.training = False
        for m, _ in ddp:
            m.require_forward_param_sync = False  # it would overwrite the buffers of all ranks with those of rank 0
        _swap_buffers(owned, buffers or {})
        _seed()
        for context in _contexts(model):
            stack.enter_context(context)
        yield


@contextmanager
def _modes_and_rng_restored(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    rng_states = get_rng_states(_devices())
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        set_rng_states(rng_states)


def _devices() -> set[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return {torch.device("cuda", i) for i in range(count)}


def _swap_buffers(owned: list[tuple[nn.Module, str, Tensor]], values: Mapping[int, Tensor]) -> None:
    copies: dict[int, Tensor] = {}
    for module, name, buffer in owned:
        if id(buffer) not in copies:
            copies[id(buffer)] = values.get(id(buffer), buffer).detach().clone()
        module._buffers[name] = copies[id(buffer)]


def _seed() -> None:
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


def _contexts(model: nn.Module) -> list[AbstractContextManager[Any]]:
    kinds = {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}
    # Weights cast here, without gradients, must not stay in the autocast cache for the training that continues.
    no_autocast = [torch.autocast(kind, enabled=False, cache_enabled=False) for kind in sorted(kinds)]
    compiled = "torch._dynamo" in sys.modules  # do not compile anything for this
    return [torch.no_grad(), *no_autocast, torch.compiler.set_stance("force_eager") if compiled else nullcontext()]


def _restore(
    modules: list[nn.Module],
    owned: list[tuple[nn.Module, str, Tensor]],
    ddp: list[tuple[DistributedDataParallel, bool]],
) -> None:
    for module, name, buffer in owned:
        module._buffers[name] = buffer
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass without a backward pass leaves weights gathered
    for module, sync in ddp:
        module.require_forward_param_sync = sync
    torch.clear_autocast_cache()

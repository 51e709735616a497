"""A look at a model on the side: it answers for a batch, and is afterwards to the bit what it was before."""

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

from surefoot.checkpoint.rng import random_states, set_random_states

_SEED = 0


@contextmanager
def quietly(model: nn.Module, instead: Mapping[int, Tensor] | None = None) -> Iterator[None]:
    """Evaluate without gradients, always with the same random numbers, and leave no trace.

    Modules work on copies of their buffers; `instead` has other values for some, by the identity of the buffer. What
    a loop has set up around it, such as autocast, does not count: only what is inside is the same another time.
    """
    modules = list(model.modules())
    chance = random_states(_devices())
    modes = [(m, m.training) for m in modules]
    buffers = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    synced = [(m, m.require_forward_param_sync) for m in modules if isinstance(m, DistributedDataParallel)]
    with ExitStack() as stack:
        stack.callback(_put_back, modes, buffers, synced, chance)
        for m in modules:
            m.training = False
        for m, _ in synced:
            m.require_forward_param_sync = False  # it would write the first process's buffers over all others
        _swap(buffers, instead or {})
        _seed()
        for context in _surroundings(model):
            stack.enter_context(context)
        yield


def _devices() -> set[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return {torch.device("cuda", i) for i in range(count)}


def _swap(buffers: list[tuple[nn.Module, str, Tensor]], instead: Mapping[int, Tensor]) -> None:
    copies: dict[int, Tensor] = {}
    for module, name, buffer in buffers:
        if id(buffer) not in copies:
            copies[id(buffer)] = instead.get(id(buffer), buffer).detach().clone()
        module._buffers[name] = copies[id(buffer)]


def _seed() -> None:
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


def _surroundings(model: nn.Module) -> list[AbstractContextManager[Any]]:
    kinds = {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}
    # Weights that are cast now, without gradients, must not be found in the cache by the training that goes on.
    plain = [torch.autocast(kind, enabled=False, cache_enabled=False) for kind in sorted(kinds)]
    compiled = "torch._dynamo" in sys.modules  # nothing is to be compiled for this
    return [torch.no_grad(), *plain, torch.compiler.set_stance("force_eager") if compiled else nullcontext()]


def _put_back(
    modes: list[tuple[nn.Module, bool]],
    buffers: list[tuple[nn.Module, str, Tensor]],
    synced: list[tuple[DistributedDataParallel, bool]],
    chance: list[tuple[Any, Any]],
) -> None:
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    for module, mode in modes:
        module.training = mode
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass without a backward leaves weights gathered
    for module, sync in synced:
        module.require_forward_param_sync = sync
    torch.clear_autocast_cache()
    set_random_states(chance)

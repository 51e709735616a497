"""Memory that the guard uses besides the model and the snapshots.

It is less than one percent of the weights, plus a copy of the buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.models.decoder import SIZES, Decoder, next_token_loss

Attach = Callable[..., Any]


def tensors_of(start: object, but: set[int]) -> dict[int, int]:
    """Bytes of every storage reachable from an object, by address, without the objects in `but`."""
    nbytes: dict[int, int] = {}
    seen, todo = set(but), [start]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | ModuleType):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            nbytes[storage.data_ptr()] = storage.nbytes()
        # A function holds its own variables, but also all of its module.
        todo += item.__closure__ or () if isinstance(item, FunctionType) else gc.get_referents(item)
    return nbytes


@pytest.mark.parametrize("clip", [1.0, "adaptive"])
@pytest.mark.parametrize("policy", ["protect", "observe"])
def test_guard_uses_under_one_percent_of_the_weights_memory(policy: str, clip: float | str, attach: Attach) -> None:
    torch.manual_seed(0)
    model = Decoder(SIZES["10m"])
    model.register_buffer("cache", torch.zeros(100_000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer, policy=policy, clip=clip, snapshot_memory=False)
    most = 0
    params = sum(p.numel() * p.element_size() for p in model.parameters())
    assert params > 40_000_000
    theirs = {p.untyped_storage().data_ptr() for p in model.parameters()}
    theirs |= {b.untyped_storage().data_ptr() for b in model.buffers()}
    but = {id(model), id(optimizer), *map(id, model.modules())}
    for _ in range(4):
        loss = guard.watch(next_token_loss(model, torch.randint(0, 256, (1, 9))))
        loss.backward()
        gradients = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
        inside: dict[int, int] = {}
        hook = optimizer.register_step_pre_hook(lambda *_, inside=inside: inside.update(tensors_of(guard, but)))
        optimizer.step()
        hook.remove()
        for nbytes in (inside, tensors_of(guard, but)):
            own = sum(size for address, size in nbytes.items() if address not in theirs | gradients)
            most = max(most, own)
        optimizer.zero_grad()
    assert most > 0, "the search found no tensors"
    shadow = sum(b.numel() * b.element_size() for b in model.buffers()) if policy == "protect" else 0
    assert most < params / 100 + shadow, f"{most:,} bytes beside {params:,} of weights and {shadow:,} of buffers"

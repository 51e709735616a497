"""Memory of the guard besides the model and the snapshots.

That is under one percent of the weights, and the shadow of the buffers.
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
    """Bytes of every storage that can be reached from an object, by address; objects in `but` are left out."""
    found: dict[int, int] = {}
    seen, todo = set(but), [start]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        # A function holds its own variables, but also all of its module.
        todo += thing.__closure__ or () if isinstance(thing, FunctionType) else gc.get_referents(thing)
    return found


@pytest.mark.parametrize("clip", [1.0, "adaptive"])
@pytest.mark.parametrize("policy", ["protect", "observe"])
def test_under_one_percent_of_the_weights(policy: str, clip: float | str, attach: Attach) -> None:
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
        for found in (inside, tensors_of(guard, but)):
            own = sum(size for address, size in found.items() if address not in theirs | gradients)
            most = max(most, own)
        optimizer.zero_grad()
    assert most > 0, "the walk found nothing at all"
    shadow = sum(b.numel() * b.element_size() for b in model.buffers()) if policy == "protect" else 0
    assert most < params / 100 + shadow, f"{most:,} bytes beside {params:,} of weights and {shadow:,} of buffers"

"""Gradients are exchanged once an update, in the backward pass of a group's last micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def grad_sync(model: nn.Module, sync: bool) -> Iterator[None]:
    """Put forward and backward of one micro-batch in here; `last` says that an update follows it.

    The last micro-batch of a group that is not full is its last one too: left out, the processes drift apart.
    """
    model = getattr(model, "_orig_mod", model)
    if sync:
        yield
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        _exchange(model, False)
        try:
            yield
        finally:
            _exchange(model, True)
    else:
        yield


def _exchange(model: FSDPModule, on: bool) -> None:
    model.set_requires_gradient_sync(on)
    model.set_is_last_backward(on)

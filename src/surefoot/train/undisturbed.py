"""A look at a model in the middle of its training, after which everything is as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In here the model is in evaluation mode; modes, buffers and random numbers are put back at the end."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()
    model.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, training in modes.items():
            module.training = training

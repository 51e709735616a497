"""The state of every source of random numbers a run draws from by default."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def random_states(devices: set[torch.device]) -> list[tuple[Callable[[Any], object], Any]]:
    """Each state with the function that sets it; of CUDA devices the given ones and the current one."""
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state(legacy=False)),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.cuda.is_initialized():
        here = torch.device("cuda", torch.cuda.current_device())
        for device in devices | {here}:
            generator = torch.cuda.default_generators[device.index]
            states.append((generator.set_state, generator.get_state()))
    return states


def set_random_states(states: list[tuple[Callable[[Any], object], Any]]) -> None:
    for put, state in states:
        put(state)

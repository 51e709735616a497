"""The state of every source of random numbers a run draws from by default."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

States = list[tuple[Callable[[Any], object], Any]]
_SLOW = 2
"""States that come first and take tens of microseconds to read: those of `random` and of NumPy."""


def random_states(devices: set[torch.device]) -> States:
    """Each state with the function that sets it; of CUDA devices the given ones and the current one."""
    return [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state(legacy=False)),
        *torch_states(devices),
    ]


def torch_states(devices: set[torch.device]) -> States:
    """Those of torch alone, which can be read in every step."""
    states: States = [(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized():
        here = torch.device("cuda", torch.cuda.current_device())
        for device in sorted(devices | {here}, key=lambda device: device.index):
            generator = torch.cuda.default_generators[device.index]
            states.append((generator.set_state, generator.get_state()))
    return states


def with_torch(states: States, torchs: States) -> States:
    """The same states of `random` and NumPy, with other ones of torch."""
    return [*states[:_SLOW], *torchs]


def moved(before: States, after: States) -> list[str]:
    """The generators that numbers were drawn from between two readings by `random_states`, in a user's words."""
    names = ["random", "NumPy", "torch", *(f"torch on device {i}" for i in range(len(before) - _SLOW - 1))]
    pairs = zip(names, before, after, strict=False)
    return [name for name, (_, was), (_, now) in pairs if not _equal(was, now)]


def moved_host(before: States, after: States) -> list[str]:
    """The same for `random` and NumPy alone."""
    return moved(before[:_SLOW], after[:_SLOW])


def moved_torch(before: States, after: States) -> bool:
    """Whether numbers were drawn from torch between two readings by `torch_states`."""
    return any(not _equal(was, now) for (_, was), (_, now) in zip(before, after, strict=False))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    return bool(a == b)


def set_random_states(states: Sequence[tuple[Callable[[Any], object], Any]]) -> None:
    for put, state in states:
        put(state)

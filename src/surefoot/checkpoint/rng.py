"""States of all random number generators that a run uses by default, and what else changes when it fetches a batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.checkpoint.copies import LiveState
from surefoot.checkpoint.tree import detach_tensors

RngStates = list[tuple[Callable[[Any], object], Any]]
"""Each state, with the function that sets it."""
_HOST_GENERATORS = 2
"""The states of `random` and NumPy come first; they take tens of microseconds to read."""


def get_rng_states(devices: set[torch.device]) -> RngStates:
    """The states of `random`, NumPy, torch, the given CUDA devices and the current one."""
    return [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state(legacy=False)),
        *get_torch_rng_states(devices),
    ]


def get_torch_rng_states(devices: set[torch.device]) -> RngStates:
    """The states of torch alone, cheap enough to read in every step."""
    states: RngStates = [(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized():
        current = torch.device("cuda", torch.cuda.current_device())
        for device in sorted(devices | {current}, key=lambda device: device.index):
            generator = torch.cuda.default_generators[device.index]
            states.append((generator.set_state, generator.get_state()))
    return states


def replace_torch_states(states: RngStates, torch_states: RngStates) -> RngStates:
    """The states of `random` and NumPy from `states`, with other torch states."""
    return [*states[:_HOST_GENERATORS], *torch_states]


def changed_generators(before: RngStates, after: RngStates) -> list[str]:
    """Names of the generators used between two calls of `get_rng_states`."""
    devices = range(len(before) - _HOST_GENERATORS - 1)
    names = ["random", "NumPy", "torch", *(f"torch on device {i}" for i in devices)]
    pairs = zip(names, before, after, strict=False)
    return [name for name, (_, old), (_, new) in pairs if not _equal(old, new)]


def changed_host_generators(before: RngStates, after: RngStates) -> list[str]:
    """Like `changed_generators`, for `random` and NumPy alone."""
    return changed_generators(before[:_HOST_GENERATORS], after[:_HOST_GENERATORS])


def torch_rng_changed(before: RngStates, after: RngStates) -> bool:
    """Whether random numbers were drawn from torch between two calls of `get_torch_rng_states`."""
    return any(not _equal(old, new) for (_, old), (_, new) in zip(before, after, strict=False))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    return bool(a == b)


def set_rng_states(states: Sequence[tuple[Callable[[Any], object], Any]]) -> None:
    for set_state, state in states:
        set_state(state)


@dataclass(frozen=True, slots=True)
class EarlierState:
    """What changes when a loop fetches its next batch, as it was before."""

    extra: Mapping[str, Any]
    """States by the name of what they belong to."""
    rng_states: list[tuple[Any, Any]] | None = None
    """None if no random number was drawn since."""
    buffers: Sequence[tuple[Tensor, Tensor]] = ()
    """Buffers that a forward pass has changed since, each with its earlier value."""
    inexact: tuple[str, ...] = ()
    """Why a run resumed from here may not reproduce the losses of the saved run."""

    def apply_to(self, live: LiveState) -> None:
        for buffer, earlier in self.buffers:
            live.replace_tensor(buffer, earlier)
        states = {name: detach_tensors(state, live.slot) for name, state in self.extra.items()}
        rng_states = live.rest.rng_states if self.rng_states is None else self.rng_states
        live.rest = replace(live.rest, extra={**live.rest.extra, **states}, rng_states=rng_states)

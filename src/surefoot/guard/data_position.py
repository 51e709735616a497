"""What moves on when a loop fetches its next batch: the place in the data, and generators of random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.checkpoint.dataloader import LoaderPosition, RngNeutralLoader, position_of
from surefoot.checkpoint.rng import RngStates, get_rng_states, get_torch_rng_states
from surefoot.checkpoint.tree import Stateful
from surefoot.guard.step_pipeline import StepPipeline

NAME = "surefoot.loader"
"""What a checkpoint calls the place in the data."""
_FEW = 64
"""Values in which the place in the data is told, up to which it is asked for after every step."""
_SMALL = 1 << 20
"""Bytes of a tensor in a state up to which it is copied before a batch is fetched; a fetch does not change larger ones,
such as averaged weights."""


class DataPosition:
    """Reads the loader, the random numbers and the extras of one loop."""

    def __init__(self, loader: Any, extra: Mapping[str, Any]) -> None:
        self.position = LoaderPosition(None) if loader is None else position_of(loader)
        keeper = self.position.stateful
        self.keeper: Stateful | None = None if keeper is None else RngNeutralLoader(keeper)
        self.quick = True
        """Where the data stands is told in so few words that it can be asked after every step."""
        self._devices: tuple[StepPipeline, set[torch.device]] | None = None
        self._extra = {name: thing for name, thing in extra.items() if not isinstance(thing, nn.Module)}
        self._generators = {name: thing for name, thing in self._extra.items() if not isinstance(thing, Stateful)}
        self._fed = {name: thing for name, thing in self._extra.items() if isinstance(thing, Iterable)}
        """Extras that give out data themselves, such as a loader or a sampler."""

    def data(self) -> dict[str, Any]:
        """Where the data stands, by its name in a checkpoint."""
        if self.keeper is None:
            return {}
        data = {NAME: copy.deepcopy(self.keeper.state_dict())}
        self.quick = _few(data)
        return data

    def generators(self) -> dict[str, Any]:
        """The generators in `extra`, as torch.Generator: few bytes, which can be read in every step."""
        return {name: thing.get_state() for name, thing in self._generators.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put generators back."""
        for name, state in states.items():
            self._generators[name].set_state(state)

    def extras(self, *, fetching: bool) -> dict[str, Any]:
        """What of `extra` a fetch may change: all of it if it is read right before one, else what gives out data."""
        chosen = self._extra if fetching else self._fed
        return {name: _copied(thing.state_dict()) for name, thing in chosen.items() if isinstance(thing, Stateful)}

    def random(self, rounds: StepPipeline) -> RngStates:
        return get_rng_states(self._devices_of(rounds))

    def torch(self, rounds: StepPipeline) -> RngStates:
        return get_torch_rng_states(self._devices_of(rounds))

    def _devices_of(self, rounds: StepPipeline) -> set[torch.device]:
        """The accelerators that hold parameters; a model may have thousands, so they are gone through once."""
        if self._devices is None or self._devices[0] is not rounds:
            self._devices = rounds, {p.device for p in rounds.layout.params if p.is_cuda}
        return self._devices[1]


def _few(state: Any) -> bool:
    """Whether a state consists of a few plain values."""
    heap, count = [state], 0
    while heap and count <= _FEW:
        one = heap.pop()
        count += 1
        heap.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ())
    return count <= _FEW


def _copied(state: Any) -> Any:
    """A state in containers of its own, with copies of its small tensors."""
    if isinstance(state, Tensor):
        return state.clone() if state.device.type == "cpu" and state.nbytes <= _SMALL else state
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copied(value) for value in state)
    return copy.copy(state)

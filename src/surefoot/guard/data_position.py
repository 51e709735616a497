"""Reads what a fetch of the next batch changes: the position in the data, and random number generators."""

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

LOADER_KEY = "surefoot.loader"
"""What a checkpoint calls the position in the data."""
_CHEAP_VALUES = 64
"""Values in a loader's state up to which it is read after every step."""
_SMALL_BYTES = 1 << 20
"""Size up to which tensors in a state are copied before a fetch; a fetch does not change larger ones, such as averaged
weights."""


class DataPosition:
    """Reads the loader, the random number generators and the extras of one loop."""

    def __init__(self, loader: Any, extra: Mapping[str, Any]) -> None:
        self.position = LoaderPosition(None) if loader is None else position_of(loader)
        keeper = self.position.stateful
        self.loader: Stateful | None = None if keeper is None else RngNeutralLoader(keeper)
        self.cheap = True
        """The loader's state is so small that it can be read after every step."""
        self._devices: tuple[StepPipeline, set[torch.device]] | None = None
        self._extra = {name: value for name, value in extra.items() if not isinstance(value, nn.Module)}
        self._generators = {name: value for name, value in self._extra.items() if not isinstance(value, Stateful)}
        self._data_sources = {name: value for name, value in self._extra.items() if isinstance(value, Iterable)}
        """Extras that yield data themselves, such as a loader or a sampler."""

    def loader_state(self) -> dict[str, Any]:
        """The position in the data, by its name in a checkpoint."""
        if self.loader is None:
            return {}
        state = {LOADER_KEY: copy.deepcopy(self.loader.state_dict())}
        self.cheap = _is_cheap(state)
        return state

    def generator_states(self) -> dict[str, Any]:
        """The generators in `extra`, such as torch.Generator: a few bytes, which can be read at every step."""
        return {name: generator.get_state() for name, generator in self._generators.items()}

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self._generators[name].set_state(state)

    def extra_states(self, *, fetching: bool) -> dict[str, Any]:
        """What a fetch may change in `extra`: all of it if read right before a fetch, else only what yields data."""
        chosen = self._extra if fetching else self._data_sources
        return {name: _copy_small(value.state_dict()) for name, value in chosen.items() if isinstance(value, Stateful)}

    def rng_states(self, pipeline: StepPipeline) -> RngStates:
        """All random states: of `random`, NumPy and torch."""
        return get_rng_states(self._devices_of(pipeline))

    def torch_rng_states(self, pipeline: StepPipeline) -> RngStates:
        return get_torch_rng_states(self._devices_of(pipeline))

    def _devices_of(self, pipeline: StepPipeline) -> set[torch.device]:
        """The accelerators that hold parameters; cached, as a model may have thousands of tensors."""
        if self._devices is None or self._devices[0] is not pipeline:
            self._devices = pipeline, {p.device for p in pipeline.layout.params if p.is_cuda}
        return self._devices[1]


def _is_cheap(state: Any) -> bool:
    """Whether a state consists of a few plain values."""
    stack, count = [state], 0
    while stack and count <= _CHEAP_VALUES:
        value = stack.pop()
        count += 1
        stack.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ())
    return count <= _CHEAP_VALUES


def _copy_small(state: Any) -> Any:
    """Copy a state's containers and its small tensors."""
    if isinstance(state, Tensor):
        return state.clone() if state.device.type == "cpu" and state.nbytes <= _SMALL_BYTES else state
    if type(state) is dict:
        return {key: _copy_small(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copy_small(value) for value in state)
    return copy.copy(state)

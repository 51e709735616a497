"""Loads a checkpoint into a live run: everything is compared before a single byte is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.format.json_state import decode
from surefoot.checkpoint.format.match import (
    CheckpointView,
    LoadPlan,
    OptimizerMatch,
    check_optimizer_count,
    check_replicated,
    match_model,
    match_optimizer,
    params_by_name,
)
from surefoot.checkpoint.format.param_names import StateNames
from surefoot.checkpoint.format.pieces import rng_by_name
from surefoot.checkpoint.format.rank_files import (
    CheckpointMismatch,
    contains_tag,
    read_entries,
    read_states,
    tensor_names_in,
)
from surefoot.checkpoint.format.shard_reader import dtype_of, read_into
from surefoot.checkpoint.rng import get_rng_states
from surefoot.checkpoint.train_state import TrainState
from surefoot.checkpoint.tree import NestedState, Stateful


@dataclass(slots=True)
class LoadResult:
    """What came with a checkpoint besides the state of the run."""

    notes: list[str] = field(default_factory=list)
    """What is not exactly as it was, as text."""
    guard: Any = None
    """The guard's own state."""
    replay_batch: Any = None
    """A batch with the loss that it must have again."""
    hash: str = ""
    """The hash that the live state must have; empty if another number of ranks saved it."""


def load_checkpoint(
    folder: Path, train_state: TrainState, names: StateNames, *, rank: int = 0, world_size: int = 1
) -> LoadResult:
    """Load the files in `folder` into the run; raises CheckpointMismatch before anything changes."""
    states = read_states(folder)
    saved = CheckpointView(str(folder), states, read_entries(folder, len(states)), rank, world_size)
    try:
        load = _CheckpointLoad(saved, train_state, names)
    except CheckpointMismatch:
        raise
    except ValueError as error:
        raise CheckpointMismatch(f"{folder} contains an invalid state: {error}. Use an older checkpoint") from None
    return load.run()


class _CheckpointLoad:
    """One load: planned and checked in the constructor, done by `run`."""

    def __init__(self, saved: CheckpointView, train_state: TrainState, names: StateNames) -> None:
        self._saved, self._train_state, self._names = saved, train_state, names
        self._result = LoadResult()
        self._new_tensors: dict[str, Tensor] = {}
        """Tensors for what no module holds, by their names in the files."""
        self._deferred: list[Callable[[], object]] = []
        """What is left to do when all tensors are filled."""
        check_optimizer_count(saved, names)
        self._plan: LoadPlan = match_model(saved, names)
        matches = [
            match_optimizer(saved, k, params, train_state.optimizers[k]) for k, params in enumerate(names.optimizers)
        ]
        self._check_world_size(matches)
        for name, source in self._plan.new_buffers.items():
            self._plan_new_buffer(name, source)
        self._plan_rest()
        for k, match in enumerate(matches):
            self._plan_optimizer(k, match)
        self._plan_rng(saved.state["chance"])
        self._result.notes += self._plan.notes + [note for match in matches for note in match.notes]

    @torch.no_grad()
    def run(self) -> LoadResult:
        targets: dict[str, Tensor] = dict(self._new_tensors)
        copies: list[tuple[Tensor, Tensor]] = []
        for source, tensors in self._plan.targets.items():
            first = tensors[0]
            if source in targets or _overlaps(first):
                buffer = targets.setdefault(source, torch.empty(first.shape, dtype=first.dtype))
                copies += [(tensor, buffer) for tensor in tensors]
            else:
                targets[source] = first
                copies += [(tensor, first) for tensor in tensors[1:]]
        read_into(targets, self._saved.entries)
        for tensor, loaded in copies:
            _copy(tensor, loaded)
        for act in self._deferred:
            act()
        for p in self._names.tensors.values():
            p.grad = None
        return self._result

    def _check_world_size(self, matches: list[OptimizerMatch]) -> None:
        if self._saved.same_world:
            return
        old, new = len(self._saved.rank_states), self._saved.world_size
        weights = [name for name in self._names.tensors if name not in self._names.buffers]
        states = [name for match in matches for state in match.states.values() for name in tensor_names_in(state)]
        check_replicated(self._saved, [*weights, *states])
        self._result.notes.append(
            f"saved by {old} ranks and loaded by {new}: weights and optimizer states are the same, buffers are those of"
            " rank 0, and random numbers continue on ranks that existed when it was saved"
        )

    # -- tensors that no module holds

    def _new_tensor(self, name: str, device: torch.device, like: Tensor | None = None, live: Any = None) -> Tensor:
        """A tensor to load `name` into: the live one if it fits, or a new one, sharded like its parameter `like`."""
        if name in self._new_tensors:
            return self._new_tensors[name]
        entry = self._saved.entries.get(name)
        if entry is None:
            raise CheckpointMismatch(f"{self._saved.folder} lacks the tensor {name}. Use an older checkpoint")
        dtype = dtype_of(entry)
        sharded = like if isinstance(like, DTensor) and tuple(like.shape) == entry.shape else None
        if isinstance(live, Tensor) and _reusable(live, entry.shape, dtype, device, sharded):
            self._new_tensors[name] = live.detach()
        elif like is not None and tuple(like.shape) == entry.shape and (sharded is not None or device == like.device):
            self._new_tensors[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            self._new_tensors[name] = torch.empty(entry.shape, dtype=dtype, device=device)
        return self._new_tensors[name]

    def _rank_tensor(self, name: str, reference: Mapping[str, Any], live: Any) -> Tensor:
        """A tensor of this rank's own: on the host if it was there, otherwise on the model's device."""
        if name in self._plan.targets:  # shared with a module
            return self._plan.targets[name][0]
        device = torch.device("cpu") if reference.get("host") else self._device()
        return self._new_tensor(name, device, live=live)

    def _device(self) -> torch.device:
        return next((t.device for t in self._names.tensors.values()), torch.device("cpu"))

    def _plan_new_buffer(self, name: str, source: str) -> None:
        module, attr = self._names.buffer_owners[name]
        current = module._buffers.get(attr)
        tensor = self._new_tensor(source, self._device() if current is None else current.device)
        self._deferred.append(lambda: module._buffers.__setitem__(attr, tensor))

    # -- optimizers

    def _plan_optimizer(self, k: int, match: OptimizerMatch) -> None:
        outer = self._train_state.optimizers[k]
        inner = self._train_state.optimizers[self._names.optimizers[k].index]
        for g, encoded in enumerate(match.groups):
            if encoded is None:
                continue
            groups = [o.param_groups[g] for o in {id(o): o for o in (outer, inner)}.values() if g < len(o.param_groups)]
            options = decode(encoded, groups[0], self._rank_tensor)
            for group in groups:
                self._deferred.append(lambda group=group, options=options: group.update(_without_params(options)))
        states: dict[Tensor, Any] = {}
        group_of = {id(p): group for group in inner.param_groups for p in group["params"]}
        for name, p in params_by_name(inner, self._names).items():
            if name in match.states:
                get = self._state_tensor(p, group_of[id(p)])
                states[p] = decode(match.states[name], inner.state.get(p), get)
        self._deferred.append(lambda: (inner.state.clear(), inner.state.update(states)))

    def _state_tensor(self, p: Tensor, group: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any], Any], Tensor]:
        """Put states where torch would: on the parameter's device, except step counters that no kernel reads."""

        def get(name: str, reference: Mapping[str, Any], live: Any) -> Tensor:
            device = p.device
            counter = name.endswith(".step") and not (group.get("capturable") or group.get("fused"))
            if reference.get("apart") or (counter and reference.get("host")):
                device = torch.device("cpu") if reference.get("host") else self._device()
            return self._new_tensor(name, device, p, live)

        return get

    # -- the rest

    def _plan_rest(self) -> None:
        state, run, notes = self._saved.state, self._train_state, self._result.notes
        if len(state["schedulers"]) != len(run.schedulers):
            raise CheckpointMismatch(
                f"{self._saved.folder} was saved with {len(state['schedulers'])} schedulers, and now there are"
                f" {len(run.schedulers)}. Pass the same ones, in the same order"
            )
        for item, encoded in zip(run.schedulers, state["schedulers"], strict=True):
            self._plan_stateful(item, encoded)
        for name, item in run.extra.items():
            if name in state["extra"]:
                self._plan_stateful(item, state["extra"][name])
            else:
                notes.append(f"extra[{name!r}] was not saved and keeps its state")
        notes += [
            f"extra[{name!r}] was saved but does not exist now" for name in state["extra"] if name not in run.extra
        ]
        self._plan_modules(state.get("modules", {}))
        self._plan_scaler(decode(state.get("scaler"), None, self._rank_tensor))
        self._result.guard = decode(state.get("guard"), None, self._rank_tensor)
        self._result.replay_batch = decode(state.get("probe"), None, self._rank_tensor)
        self._result.hash = str(state.get("hash", "")) if self._saved.same_world else ""

    def _plan_stateful(self, item: Any, encoded: Any) -> None:
        """Load the state of an object; it keeps what JSON could not express."""
        stateful = isinstance(item, Stateful)
        live = None
        if contains_tag(encoded, ("$left_out", "$nested")):
            live = item.state_dict() if stateful else item.get_state()
        state = decode(encoded, live, self._rank_tensor)
        self._deferred.append(lambda: (item.load_state_dict if stateful else item.set_state)(_load_nested(state)))

    def _plan_modules(self, encoded: Mapping[str, Any]) -> None:
        """Modules with an extra state load it themselves."""
        modules, notes = self._names.stateful_modules, self._result.notes
        for name, module in modules.items():
            if name in encoded:
                live = module.get_extra_state() if contains_tag(encoded[name], ("$left_out", "$nested")) else None
                state = decode(encoded[name], live, self._rank_tensor)
                self._deferred.append(lambda module=module, state=state: module.set_extra_state(_load_nested(state)))
            else:
                notes.append(f"the extra state of {name} was not saved and stays as it is")
        notes += [f"the extra state of {name} was saved, but no module takes it" for name in encoded.keys() - modules]

    def _plan_rng(self, encoded: Mapping[str, Any]) -> None:
        if self._saved.rank >= len(self._saved.rank_states):
            return  # this rank did not exist when it was saved
        live = get_rng_states({t.device for t in self._names.tensors.values() if t.is_cuda})
        current, setters = rng_by_name(live), rng_by_name([(set_state, set_state) for set_state, _ in live])
        for name in current.keys() & encoded.keys():
            state = decode(encoded[name], current[name], self._rank_tensor)
            self._deferred.append(lambda set_state=setters[name], state=state: set_state(state))
        if current.keys() != encoded.keys():
            self._result.notes.append("random states were saved for another set of devices")

    def _plan_scaler(self, state: Any) -> None:
        scaler: Any = self._train_state.scaler
        enabled = scaler is not None and scaler.is_enabled()
        if bool(state) != enabled:
            old, new = ("with", "without") if state else ("without", "with")
            self._result.notes.append(f"saved {old} an enabled GradScaler and loaded {new} one")
        if not state or not enabled:
            return
        self._deferred.append(lambda: _load_scaler(scaler, state))


def _load_scaler(scaler: Any, state: Mapping[str, Any]) -> None:
    for name in ("_growth_factor", "_backoff_factor", "_growth_interval"):
        setattr(scaler, name, state[name])
    if state["_scale"] is None:
        return
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    for name in ("_scale", "_growth_tracker"):
        getattr(scaler, name).copy_(state[name])


def _load_nested(state: Any) -> Any:
    """Load the states of objects within a state, now that tensors are filled."""
    if isinstance(state, NestedState):
        state.owner.load_state_dict(_load_nested(state.state))
        return state.owner
    if type(state) is dict:
        return {k: _load_nested(v) for k, v in state.items()}
    return type(state)(_load_nested(v) for v in state) if type(state) in (list, tuple) else state


def _without_params(options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "params"}


def _reusable(live: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, sharded: Any) -> bool:
    """Whether the saved tensor can be loaded into this one."""
    if (tuple(live.shape), live.dtype, live.device) != (shape, dtype, device) or _overlaps(live) or live.is_meta:
        return False
    if not isinstance(live, DTensor):
        return sharded is None and live.layout is torch.strided
    return sharded is not None and live.placements == sharded.placements and live.device_mesh == sharded.device_mesh


def _overlaps(tensor: Tensor) -> bool:
    """Whether one value in memory stands for many."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return any(stride == 0 and size > 1 for size, stride in zip(part.shape, part.stride(), strict=True))


def _copy(target: Tensor, source: Tensor) -> None:
    if isinstance(target, DTensor) or not _overlaps(target):
        target.copy_(source)
        return
    for d, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(d, 0, 1), source.narrow(d, 0, 1)
    target.copy_(source)

"""Matches a checkpoint with the live model and optimizers by name and shape, before a byte is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.checkpoint.format.param_names import OptimizerParams, StateNames
from surefoot.checkpoint.format.rank_files import (
    CheckpointMismatch,
    TensorEntry,
    first_names,
    rank_tensor_name,
    root_of,
)
from surefoot.checkpoint.format.shard_reader import dtype_of, read_part

ORDER_SENSITIVE = frozenset({"LBFGS"})
"""Optimizers that keep all parameters in one flat vector, so that their order matters."""


@dataclass(slots=True)
class CheckpointView:
    """A checkpoint as one rank of the live run sees it."""

    folder: str
    rank_states: list[dict[str, Any]]
    """The JSON states of all ranks that saved it."""
    entries: Mapping[str, TensorEntry]
    rank: int
    world_size: int
    _rank_tensors: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._rank_tensors = frozenset(self.state["own"])

    @property
    def same_world(self) -> bool:
        return len(self.rank_states) == self.world_size

    @property
    def state(self) -> dict[str, Any]:
        """The state that this rank saved, or that of rank 0 if there was no such rank."""
        return self.rank_states[self.rank if self.rank < len(self.rank_states) else 0]

    def source(self, name: str) -> str | None:
        """The name in the files of the tensor that this rank's model calls `name`; None if it was not saved."""
        return next((n for n in (rank_tensor_name(name, self.rank), name) if self._has(n, name)), None)

    def _has(self, stored: str, name: str) -> bool:
        return stored in self.entries and (stored == name or (self.same_world and name in self._rank_tensors))

    def names_in(self, key: str) -> set[str]:
        """The names under this key of the state of this rank, or of all ranks if their number has changed."""
        states = [self.state] if self.same_world else self.rank_states
        return {name for state in states for name in state[key]}


@dataclass(slots=True)
class LoadPlan:
    """Which saved tensor is loaded into which live tensor."""

    targets: dict[str, list[Tensor]] = field(default_factory=dict)
    """By name in the files; a tensor that was shared when saved may be two now."""
    new_buffers: dict[str, str] = field(default_factory=dict)
    """Names of buffers that must be created, and of the tensors saved for them."""
    notes: list[str] = field(default_factory=list)


def match_model(saved: CheckpointView, names: StateNames) -> LoadPlan:
    """Find the target of every tensor that modules hold; raises CheckpointMismatch."""
    plan = LoadPlan()
    aliases: dict[str, str] = {k: str(v) for state in saved.rank_states for k, v in state["aliases"].items()}
    roots = {root_of(name) for name in saved.names_in("tensors")}
    missing: list[str] = []
    different: list[str] = []
    used: set[str] = set()
    for name, live in names.tensors.items():
        known = name if name in saved.entries else aliases.get(name, name)
        source = saved.source(known)
        if source is None:
            if root_of(name) in roots and name not in names.non_persistent:
                missing.append(name)
            continue
        used.add(known)
        difference = _difference(name, live, saved.entries[source])
        if not difference:
            plan.targets.setdefault(source, []).append(live.detach())
        elif name not in names.buffers:
            different.append(difference)
        elif name not in names.non_persistent:
            plan.new_buffers[name] = source
        else:
            plan.notes.append(f"{difference}: this buffer is not persistent, and keeps its value")
    _plan_missing_buffers(saved, names, plan, used)
    unknown = saved.names_in("tensors") - used - set(names.aliases) - saved.names_in("passing")
    live_roots = {root_of(name) for name in (*names.tensors, *names.buffer_owners)}
    unexpected = sorted(name for name in unknown if root_of(name) in live_roots)
    _raise_mismatch(saved, missing, unexpected, different, names)
    plan.notes += _tie_notes(saved, names, aliases)
    plan.notes += [f"{root} was saved but does not exist now" for root in sorted(roots - live_roots)]
    plan.notes += [f"{root} was not saved and keeps its values" for root in sorted(live_roots - roots)]
    return plan


def _plan_missing_buffers(saved: CheckpointView, names: StateNames, plan: LoadPlan, used: set[str]) -> None:
    for name in names.buffer_owners:
        source = saved.source(name) if name not in names.tensors and name not in names.aliases else None
        if source is not None:
            plan.new_buffers[name] = source
            used.add(name)


def _difference(name: str, live: Tensor, entry: TensorEntry) -> str:
    """How a live tensor differs from the saved one; empty if it does not."""
    if live.is_meta:
        return f"{name} is on the meta device"
    if tuple(live.shape) != entry.shape:
        return f"{name} has shape {tuple(live.shape)}, but {entry.shape} was saved"
    if live.dtype != dtype_of(entry):
        return f"{name} is {live.dtype}, but torch.{entry.dtype} was saved"
    return ""


def _raise_mismatch(
    saved: CheckpointView,
    missing: Sequence[str],
    unexpected: Sequence[str],
    different: Sequence[str],
    names: StateNames,
) -> None:
    problems = [f"not in the checkpoint: {first_names(missing)}"] if missing else []
    problems += [f"only in the checkpoint: {first_names(unexpected)}"] if unexpected else []
    problems += [f"different: {first_names(different)}"] if different else []
    if not problems:
        return
    way_out = "Build the model that was saved, or load only its weights"
    if names.uninitialized:
        way_out = f"Run a forward pass first: {first_names(names.uninitialized)} have no shape yet"
    elif not saved.same_world:
        way_out += f". It was saved by {len(saved.rank_states)} ranks, and now there are {saved.world_size}"
    raise CheckpointMismatch(f"{saved.folder} is of another model. {'; '.join(problems)}. {way_out}")


def _tie_notes(saved: CheckpointView, names: StateNames, aliases: Mapping[str, str]) -> list[str]:
    tied = [name for name in names.aliases if name in saved.entries and names.aliases[name] in saved.entries]
    untied = [name for name in names.tensors if name in aliases and name not in saved.entries]
    notes = [f"tied now but not when saved, so the values of the first are used: {first_names(tied)}"] if tied else []
    if untied:
        notes.append(f"tied when saved but not now, so both get the same values: {first_names(untied)}")
    return notes


def check_replicated(saved: CheckpointView, names: Sequence[str]) -> None:
    """Raise CheckpointMismatch if another number of ranks saved it and these tensors differed between ranks."""
    if saved.same_world:
        return
    for state in saved.rank_states[1:]:
        rank_only = set(state["own"])
        differing = [name for name in names if name in rank_only and not _equal(saved, name, state["rank"])]
        if differing:
            count = len(saved.rank_states)
            raise CheckpointMismatch(
                f"{saved.folder} was saved by {count} ranks, each with its own values of {first_names(differing)},"
                f" which neither DTensor nor DistributedDataParallel distributed. Load it with {count} ranks"
            )


def _equal(saved: CheckpointView, name: str, rank: int) -> bool:
    first, other = saved.entries.get(name), saved.entries.get(rank_tensor_name(name, rank))
    if first is None or other is None or first.shape != other.shape or first.dtype != other.dtype:
        return False
    first_bytes, other_bytes = (read_part(e, e.parts[0]).reshape(-1).view(torch.uint8) for e in (first, other))
    return torch.equal(first_bytes, other_bytes)


# -- optimizers: parameters are matched by name, never by index


@dataclass(slots=True)
class OptimizerMatch:
    """What one optimizer loads, still encoded as JSON."""

    groups: list[Any] = field(default_factory=list)
    """The options of each live group; None if none were saved."""
    states: dict[str, Any] = field(default_factory=dict)
    """By the name of the parameter."""
    notes: list[str] = field(default_factory=list)


def match_optimizer(saved: CheckpointView, k: int, params: OptimizerParams, optimizer: Optimizer) -> OptimizerMatch:
    """Match one optimizer with what was saved for it; raises CheckpointMismatch."""
    state = saved.state["optimizers"][k]
    if state["class"] != params.cls:
        raise CheckpointMismatch(
            f"{saved.folder}: optimizer {k} is {params.cls}, but {state['class']} was saved, and their states are not"
            f" compatible. Build {state['class']}, or load only the weights"
        )
    if len(state["groups"]) != len(params.groups):
        raise CheckpointMismatch(
            f"{saved.folder}: optimizer {k} has {len(params.groups)} parameter groups, but {len(state['groups'])} were"
            " saved. Build the groups that were saved, or load only the weights"
        )
    match = OptimizerMatch()
    saved_groups = [[str(name) for name in group["params"]] for group in state["groups"]]
    _compare_params(saved, k, saved_groups, params)
    if saved_groups != params.groups:
        match.notes.append(_grouping_note(saved, k, saved_groups, params))
    for g, names in enumerate(params.groups):
        match.groups.append(state["groups"][_saved_group_of(g, names, saved_groups)].get("options"))
    _compare_options(saved, k, match, optimizer)
    merged: dict[str, Any] = {}
    for rank_state in (saved.state, *saved.rank_states):
        for name, value in rank_state["optimizers"][k]["state"].items():
            merged.setdefault(name, value)
    live_names = {name for group in params.groups for name in group}
    match.states = {name: value for name, value in merged.items() if name in live_names}
    return match


def check_optimizer_count(saved: CheckpointView, names: StateNames) -> None:
    live, counts = len(names.optimizers), {len(state["optimizers"]) for state in saved.rank_states}
    if counts != {live}:
        raise CheckpointMismatch(
            f"{saved.folder} was saved with {max(counts)} optimizers, and now there are {live}. Pass the same ones, in"
            " the same order"
        )


def _compare_params(
    saved: CheckpointView, k: int, saved_groups: Sequence[Sequence[str]], params: OptimizerParams
) -> None:
    old, new = {n for g in saved_groups for n in g}, {n for g in params.groups for n in g}
    changes = [f"new: {first_names(sorted(new - old))}"] if new - old else []
    changes += [f"gone: {first_names(sorted(old - new))}"] if old - new else []
    if changes:
        raise CheckpointMismatch(
            f"{saved.folder}: optimizer {k} does not have the parameters it was saved with. {'; '.join(changes)}. Pass"
            " the same ones, or load only the weights"
        )


def _compare_options(saved: CheckpointView, k: int, match: OptimizerMatch, optimizer: Optimizer) -> None:
    """Options that a version of torch added or removed are fine; a state needs the options it was made with."""
    for group, options in zip(optimizer.param_groups, match.groups, strict=True):
        if options is None:
            continue
        if not isinstance(options, dict):
            raise CheckpointMismatch(
                f"{saved.folder}: the options of optimizer {k} are not valid. Use an older checkpoint"
            )
        new = [name for name in group if name != "params" and name not in options]
        if new:
            match.notes.append(f"optimizer {k}: {first_names(new)} were not saved and keep their values")


def _grouping_note(
    saved: CheckpointView, k: int, saved_groups: Sequence[Sequence[str]], params: OptimizerParams
) -> str:
    regrouped = [sorted(g) for g in saved_groups] != [sorted(g) for g in params.groups]
    if params.cls in ORDER_SENSITIVE:
        raise CheckpointMismatch(
            f"{saved.folder}: the parameters of optimizer {k} are in another order, and {params.cls} depends on it."
            " Pass them in the order in which they were saved"
        )
    if not regrouped:
        return f"optimizer {k}: its parameters are in another order, and were matched by name"
    return (
        f"optimizer {k}: its parameters are grouped differently, and were matched by name. Each group has the options"
        " of the group its first parameter was in; schedulers go by the index of a group"
    )


def _saved_group_of(g: int, names: Sequence[str], saved_groups: Sequence[Sequence[str]]) -> int:
    """The index of the saved group that contains the first of these parameters."""
    if not names:
        return g
    return next((i for i, group in enumerate(saved_groups) if names[0] in group), g)


def params_by_name(optimizer: Optimizer, names: StateNames) -> Mapping[str, Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {names.by_id[id(p)]: p for p in params if id(p) in names.by_id}

"""Whether a checkpoint is of the model that is there: every name and shape is compared before a byte is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.format.mismatch import DoesNotFit, few
from surefoot.checkpoint.format.param_names import Names
from surefoot.checkpoint.format.reader import dtype_of, read_part
from surefoot.checkpoint.format.safetensors_headers import Entry
from surefoot.checkpoint.format.state_files import own_name, root_of


@dataclass(slots=True)
class Saved:
    """A checkpoint as one process of the run that is there sees it."""

    where: str
    told: list[dict[str, Any]]
    """Of all processes that saved it."""
    entries: Mapping[str, Entry]
    rank: int
    world_size: int
    _mine: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._mine = frozenset(self.own["own"])

    @property
    def same_world(self) -> bool:
        return len(self.told) == self.world_size

    @property
    def own(self) -> dict[str, Any]:
        """What this process told then, or the first one, if there was no such process."""
        return self.told[self.rank if self.rank < len(self.told) else 0]

    def source(self, name: str) -> str | None:
        """The name in the files of what a module of this process calls by `name`."""
        return next((n for n in (own_name(name, self.rank), name) if self._has(n, name)), None)

    def _has(self, stored: str, name: str) -> bool:
        return stored in self.entries and (stored == name or (self.same_world and name in self._mine))

    def all_of(self, key: str) -> set[str]:
        """Names that the process with this number told, or all of them, if their number has changed."""
        told = [self.own] if self.same_world else self.told
        return {name for one in told for name in one[key]}


@dataclass(slots=True)
class Aims:
    """Which saved tensor goes where."""

    into: dict[str, list[Tensor]] = field(default_factory=dict)
    """By the name in the files; one that was shared then may be two now."""
    buffers: dict[str, str] = field(default_factory=dict)
    """Names of buffers that have to be made anew, and of what is saved for them."""
    notes: list[str] = field(default_factory=list)


def fit_model(saved: Saved, names: Names) -> Aims:
    """Find the place of every tensor that modules hold; raises DoesNotFit."""
    aims = Aims()
    aliases: dict[str, str] = {k: str(v) for told in saved.told for k, v in told["aliases"].items()}
    roots = {root_of(name) for name in saved.all_of("tensors")}
    missing: list[str] = []
    apart: list[str] = []
    used: set[str] = set()
    for name, live in names.tensors.items():
        known = name if name in saved.entries else aliases.get(name, name)
        source = saved.source(known)
        if source is None:
            if root_of(name) in roots and name not in names.passing:
                missing.append(name)
            continue
        used.add(known)
        entry = saved.entries[source]
        differs = _differs(name, live, entry)
        if not differs:
            aims.into.setdefault(source, []).append(live.detach())
        elif name not in names.buffers:
            apart.append(differs)
        elif name not in names.passing:
            aims.buffers[name] = source
        else:
            aims.notes.append(f"{differs}: this buffer is no part of its module's state, and stays as it is")
    _make_missing_buffers(saved, names, aims, used)
    unknown = saved.all_of("tensors") - used - set(names.aliases) - saved.all_of("passing")
    live_roots = {root_of(name) for name in (*names.tensors, *names.homes)}
    left = sorted(name for name in unknown if root_of(name) in live_roots)
    _complain(saved, missing, left, apart, names)
    aims.notes += _changed_ties(saved, names, aliases)
    aims.notes += [f"{root} was saved, and is not there now" for root in sorted(roots - live_roots)]
    aims.notes += [f"{root} was not saved, and stays as it is" for root in sorted(live_roots - roots)]
    return aims


def _make_missing_buffers(saved: Saved, names: Names, aims: Aims, used: set[str]) -> None:
    for name in names.homes:
        source = saved.source(name) if name not in names.tensors and name not in names.aliases else None
        if source is not None:
            aims.buffers[name] = source
            used.add(name)


def _differs(name: str, live: Tensor, entry: Entry) -> str:
    """How a tensor differs from the saved one, in words."""
    if live.is_meta:
        return f"{name} is on the meta device"
    if tuple(live.shape) != entry.shape:
        return f"{name} has shape {tuple(live.shape)}, and {entry.shape} was saved"
    if live.dtype != dtype_of(entry):
        return f"{name} is {live.dtype}, and torch.{entry.dtype} was saved"
    return ""


def _complain(saved: Saved, missing: Sequence[str], left: Sequence[str], apart: Sequence[str], names: Names) -> None:
    told = [f"not in the checkpoint: {few(missing)}"] if missing else []
    told += [f"only in the checkpoint: {few(left)}"] if left else []
    told += [f"different: {few(apart)}"] if apart else []
    if not told:
        return
    way = "Build the model it was saved from, or load its weights alone"
    if names.unready:
        way = f"Run a forward pass first: {few(names.unready)} have no shape yet"
    elif not saved.same_world:
        way += f". It was saved by {len(saved.told)} processes, and {saved.world_size} are there"
    raise DoesNotFit(f"{saved.where} is of another model. {'; '.join(told)}. {way}")


def _changed_ties(saved: Saved, names: Names, aliases: Mapping[str, str]) -> list[str]:
    tied = [name for name in names.aliases if name in saved.entries and names.aliases[name] in saved.entries]
    apart = [name for name in names.tensors if name in aliases and name not in saved.entries]
    notes = [f"tied now and not when saved, the first one's values count: {few(tied)}"] if tied else []
    return notes + ([f"tied when saved and not now, both have the same values: {few(apart)}"] if apart else [])


def check_alike(saved: Saved, named: Sequence[str]) -> None:
    """Other processes than then can go on only from what was the same in all of them."""
    if saved.same_world:
        return
    for told in saved.told[1:]:
        mine = set(told["own"])
        apart = [name for name in named if name in mine and not _equal(saved, name, told["rank"])]
        if apart:
            raise DoesNotFit(
                f"{saved.where} was saved by {len(saved.told)} processes, each with values of its own in {few(apart)}:"
                f" neither DTensor nor DistributedDataParallel spread them. Load it with {len(saved.told)} processes"
            )


def _equal(saved: Saved, name: str, rank: int) -> bool:
    one, two = saved.entries.get(name), saved.entries.get(own_name(name, rank))
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
        return False
    first, other = (read_part(e, e.parts[0]).reshape(-1).view(torch.uint8) for e in (one, two))
    return torch.equal(first, other)

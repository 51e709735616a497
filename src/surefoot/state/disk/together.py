"""The way back from files: every name is checked against the run that is there before a single byte is written."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from surefoot.state.capture import Whole
from surefoot.state.chance import random_states
from surefoot.state.disk.names import Names
from surefoot.state.disk.pieces import SCHEMA, tensors_in
from surefoot.state.disk.plain import untold
from surefoot.state.tree import Stateful

MOST = 1 << 28
"""Bytes of one JSON file of a state, above which it is not read."""


class DoesNotFit(ValueError):
    """A checkpoint and the run that is there do not belong together; nothing was written."""


@dataclass(slots=True)
class Restored:
    """What came of putting a state back."""

    notes: list[str] = field(default_factory=list)
    """What is not exactly as it was, in words."""
    guard: Any = None
    """What else was told with the run."""


def state_file(rank: int) -> str:
    return f"state-{rank + 1:05d}.json"


def put_together(folder: Path, whole: Whole, names: Names, *, rank: int = 0, world_size: int = 1) -> Restored:
    """Make the run what it was when the files in `folder` were written."""
    return _Together(folder, whole, names, rank, world_size).done()


class _Together:
    def __init__(self, folder: Path, whole: Whole, names: Names, rank: int, world_size: int) -> None:
        self._folder = folder
        self._whole = whole
        self._names = names
        first = _read(folder / state_file(0))
        then = int(first["world_size"])
        self._told = [first, *(_read(folder / state_file(r)) for r in range(1, then))]
        self._own = self._told[rank if then == world_size else 0]
        self._restored = Restored()
        if then != world_size:
            self._restored.notes.append(
                f"saved by {then} processes and loaded by {world_size}: weights and optimizer are the same, random"
                " numbers are those of the first process"
            )
        self._reader = HuggingFaceStorageReader(str(folder))
        self._entries: Mapping[str, Any] = self._reader.read_metadata().state_dict_metadata
        self._targets: dict[str, Tensor] = {}

    @torch.no_grad()
    def done(self) -> Restored:
        self._aim_at_modules()
        states = [self._states_of(k) for k in range(len(self._whole.optimizers))]
        self._aim_at_states(states)
        for name, how in tensors_in({k: v for k, v in self._own.items() if k != "optimizers"}):
            self._new(name, how)
        for k in range(len(self._whole.optimizers)):
            for name, how in tensors_in(self._own["optimizers"][k]["groups"]):
                self._new(name, how)
        self._load()
        for k, state in enumerate(states):
            self._put_optimizer(k, state)
        self._put_rest()
        self._restored.guard = untold(self._own.get("guard"), None, self._tensor)
        return self._restored

    # -- where everything goes

    def _aim_at_modules(self) -> None:
        aliases: Mapping[str, str] = self._told[0].get("aliases", {})
        missing, apart = [], []
        for name, tensor in self._names.tensors.items():
            saved = name if name in self._entries else aliases.get(name, name)
            entry = self._entries.get(saved)
            if entry is None and name not in self._names.passing:
                missing.append(name)
            elif entry is not None and tuple(entry.size) != tuple(tensor.shape):
                if name not in self._names.passing:
                    apart.append(f"{name} has shape {tuple(tensor.shape)}, saved {tuple(entry.size)}")
            elif entry is not None:
                self._targets[saved] = tensor.detach()
        roots = {name.partition(".")[0] for name in self._names.tensors}
        left = [n for n in self._entries if n.partition(".")[0] in roots and n not in self._targets]
        left = [n for n in left if n not in self._names.passing and not self._known(n)]
        told = [f"not in the checkpoint: {_few(missing)}"] if missing else []
        told += [f"only in the checkpoint: {_few(left)}"] if left else []
        told += [f"of another shape: {_few(apart)}"] if apart else []
        if missing or apart:
            raise DoesNotFit(
                f"{self._folder} is of another model. {'; '.join(told)}. Build the model it was saved from"
            )
        self._restored.notes += told

    def _known(self, name: str) -> bool:
        return name in self._names.aliases

    def _states_of(self, k: int) -> dict[str, Any]:
        """What is saved for the parameters that an optimizer holds, by whichever process had it."""
        if any(k >= len(told["optimizers"]) for told in self._told):
            raise DoesNotFit(f"{self._folder} was saved with {len(self._told[0]['optimizers'])} optimizers")
        merged: dict[str, Any] = {}
        for told in self._told:
            merged |= told["optimizers"][k]["state"]
        merged |= self._own["optimizers"][k]["state"]
        held = self._held(k)
        return {name: merged[name] for name in held if name in merged}

    def _held(self, k: int) -> dict[str, Tensor]:
        optimizer = self._whole.optimizers[k]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return {self._names.of[id(p)]: p for p in params if id(p) in self._names.of}

    def _aim_at_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        for k, state in enumerate(states):
            held = self._held(k)
            for param, told in state.items():
                for name, how in tensors_in(told):
                    self._new(name, how, held[param])

    def _new(self, name: str, how: Mapping[str, Any], like: Tensor | None = None) -> None:
        """A tensor for what is saved under a name: spread as its parameter is, if it has the same shape."""
        entry = self._entries.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise DoesNotFit(f"{self._folder} lacks the tensor {name}")
        if name in self._targets:
            return
        shape, dtype = entry.size, entry.properties.dtype
        beside = like if like is not None else next(iter(self._names.tensors.values()))
        device = torch.device("cpu") if how.get("host") else beside.device
        alike = like is not None and tuple(shape) == tuple(like.shape)
        if like is not None and alike and (isinstance(like, DTensor) or device == like.device):
            self._targets[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            self._targets[name] = torch.empty(shape, dtype=dtype, device=device)

    def _load(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that no processes are asked, which is as it should be
            try:
                dcp.load(self._targets, storage_reader=self._reader, no_dist=True)
            except dcp.CheckpointException as error:  # no Exception by its class
                raise DoesNotFit(f"{self._folder} cannot be read: {error}") from None

    # -- and what is no weight

    def _tensor(self, name: str, how: Mapping[str, Any]) -> Tensor:
        return self._targets[name]

    def _put_optimizer(self, k: int, states: Mapping[str, Any]) -> None:
        optimizer = self._whole.optimizers[k]
        groups = self._own["optimizers"][k]["groups"]
        if groups and len(groups) != len(optimizer.param_groups):
            raise DoesNotFit(f"optimizer {k} has {len(optimizer.param_groups)} parameter groups, saved {len(groups)}")
        for group, told in zip(optimizer.param_groups, groups, strict=False):
            values = untold(told, group, self._tensor)
            group.update({name: value for name, value in values.items() if name != "params"})
        held = self._held(k)
        optimizer.state.clear()
        for name, told in states.items():
            optimizer.state[held[name]] = untold(told, None, self._tensor)

    def _put_rest(self) -> None:
        own, whole = self._own, self._whole
        if len(own["schedulers"]) != len(whole.schedulers):
            self._restored.notes.append(
                f"{len(own['schedulers'])} schedulers were saved and {len(whole.schedulers)} are there"
            )
        for scheduler, told in zip(whole.schedulers, own["schedulers"], strict=False):
            scheduler.load_state_dict(untold(told, scheduler.state_dict(), self._tensor))
        self._put_scaler(untold(own["scaler"], None, self._tensor))
        for name, thing in whole.extra.items():
            if name not in own["extra"]:
                self._restored.notes.append(f"extra[{name!r}] was not saved, and stays as it is")
                continue
            state = untold(own["extra"][name], None, self._tensor)
            thing.load_state_dict(state) if isinstance(thing, Stateful) else thing.set_state(state)
        devices = {t.device for t in self._names.tensors.values() if t.is_cuda}
        live = random_states(devices)
        for (put, now), told in zip(live, own["chance"], strict=False):
            put(untold(told, now, self._tensor))
        if len(live) != len(own["chance"]):
            self._restored.notes.append("random numbers were saved of other devices than there are")

    def _put_scaler(self, kept: Any) -> None:
        scaler = self._whole.scaler
        if not kept or scaler is None:
            return
        for name in ("_growth_factor", "_backoff_factor", "_growth_interval"):
            setattr(scaler, name, kept[name])
        if kept["_scale"] is None:
            return
        if scaler._scale is None:
            scaler._init_scale, scaler._init_growth_tracker = float(kept["_scale"]), int(kept["_growth_tracker"])
        else:
            scaler._scale.copy_(kept["_scale"])
            scaler._growth_tracker.copy_(kept["_growth_tracker"])


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST:
            raise DoesNotFit(f"{path} is too large to be a state")
        told = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, DoesNotFit) else DoesNotFit(f"{path} cannot be read: {error}") from None
    if not isinstance(told, dict) or told.get("schema") != SCHEMA or not isinstance(told.get("world_size"), int):
        raise DoesNotFit(f"{path} holds no state that this version knows")
    return told


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more

"""The way back from files: everything is compared with the run that is there before a single byte is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.format.json_state import untold
from surefoot.checkpoint.format.match_model import Aims, Saved, check_alike, fit_model
from surefoot.checkpoint.format.match_optimizer import Regrouped, count_optimizers, fit_optimizer, held_by
from surefoot.checkpoint.format.mismatch import DoesNotFit
from surefoot.checkpoint.format.param_names import Names
from surefoot.checkpoint.format.pieces import chances
from surefoot.checkpoint.format.reader import dtype_of, read_into
from surefoot.checkpoint.format.safetensors_headers import read_entries
from surefoot.checkpoint.format.state_files import has_any, read_states, tensors_in
from surefoot.checkpoint.rng import random_states
from surefoot.checkpoint.train_state import TrainState
from surefoot.checkpoint.tree import Nested, Stateful

__all__ = ["DoesNotFit", "Restored", "put_together"]


@dataclass(slots=True)
class Restored:
    """What came of putting a state back."""

    notes: list[str] = field(default_factory=list)
    """What is not exactly as it was, in words."""
    guard: Any = None
    """What else was told with the run."""
    probe: Any = None
    """A batch with the loss that it must have again."""
    hash: str = ""
    """What the state must hash to; empty where it was saved by another number of processes."""


def put_together(folder: Path, whole: TrainState, names: Names, *, rank: int = 0, world_size: int = 1) -> Restored:
    """Make the run what it was when the files in `folder` were written; raises DoesNotFit before anything changes."""
    told = read_states(folder)
    saved = Saved(str(folder), told, read_entries(folder, len(told)), rank, world_size)
    try:
        together = _Together(saved, whole, names)
    except DoesNotFit:
        raise
    except ValueError as error:
        raise DoesNotFit(f"{folder} holds something that is no state: {error}. Take an older checkpoint") from None
    return together.done()


class _Together:
    """All that is to be done, found out when it is made, and done by `done`."""

    def __init__(self, saved: Saved, whole: TrainState, names: Names) -> None:
        self._saved, self._whole, self._names = saved, whole, names
        self._restored = Restored()
        self._fresh: dict[str, Tensor] = {}
        """Tensors for what no module holds, by their names in the files."""
        self._then: list[Callable[[], object]] = []
        """What is left to do when all tensors are filled."""
        count_optimizers(saved, names)
        self._aims: Aims = fit_model(saved, names)
        parts = [fit_optimizer(saved, k, held, whole.optimizers[k]) for k, held in enumerate(names.optimizers)]
        self._say_world(parts)
        for name, source in self._aims.buffers.items():
            self._make_buffer(name, source)
        self._aim_at_rest()
        for k, part in enumerate(parts):
            self._aim_at_optimizer(k, part)
        self._aim_at_chance(saved.own["chance"])
        self._restored.notes += self._aims.notes + [note for part in parts for note in part.notes]

    @torch.no_grad()
    def done(self) -> Restored:
        targets: dict[str, Tensor] = dict(self._fresh)
        late: list[tuple[Tensor, Tensor]] = []
        for source, lives in self._aims.into.items():
            first = lives[0]
            if source in targets or _overlaps(first):
                found = targets.setdefault(source, torch.empty(first.shape, dtype=first.dtype))
                late += [(live, found) for live in lives]
            else:
                targets[source] = first
                late += [(live, first) for live in lives[1:]]
        read_into(targets, self._saved.entries)
        for live, found in late:
            _copy(live, found)
        for act in self._then:
            act()
        for p in self._names.tensors.values():
            p.grad = None
        return self._restored

    def _say_world(self, parts: list[Regrouped]) -> None:
        if self._saved.same_world:
            return
        then, now = len(self._saved.told), self._saved.world_size
        weights = [name for name in self._names.tensors if name not in self._names.buffers]
        states = [name for part in parts for state in part.states.values() for name in tensors_in(state)]
        check_alike(self._saved, [*weights, *states])
        self._restored.notes.append(
            f"saved by {then} processes and loaded by {now}: weights and optimizer are the same, buffers are those of"
            " the first process, random numbers go on where there was such a process"
        )

    # -- tensors that no module holds

    def _new(self, name: str, device: torch.device, like: Tensor | None = None, live: Any = None) -> Tensor:
        """A tensor for what is saved under a name: the one in its place, or one spread as its parameter is."""
        if name in self._fresh:
            return self._fresh[name]
        entry = self._saved.entries.get(name)
        if entry is None:
            raise DoesNotFit(f"{self._saved.where} lacks the tensor {name}. Take an older checkpoint")
        dtype = dtype_of(entry)
        spread = like if isinstance(like, DTensor) and tuple(like.shape) == entry.shape else None
        if isinstance(live, Tensor) and _serves(live, entry.shape, dtype, device, spread):
            self._fresh[name] = live.detach()
        elif like is not None and tuple(like.shape) == entry.shape and (spread is not None or device == like.device):
            self._fresh[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            self._fresh[name] = torch.empty(entry.shape, dtype=dtype, device=device)
        return self._fresh[name]

    def _own(self, name: str, how: Mapping[str, Any], live: Any) -> Tensor:
        """A tensor of this process's own: on the host if it was there, else beside the model."""
        if name in self._aims.into:  # shared with a module
            return self._aims.into[name][0]
        return self._new(name, torch.device("cpu") if how.get("host") else self._device(), live=live)

    def _device(self) -> torch.device:
        return next((t.device for t in self._names.tensors.values()), torch.device("cpu"))

    def _make_buffer(self, name: str, source: str) -> None:
        module, attr = self._names.homes[name]
        now = module._buffers.get(attr)
        made = self._new(source, self._device() if now is None else now.device)
        self._then.append(lambda: module._buffers.__setitem__(attr, made))

    # -- optimizers

    def _aim_at_optimizer(self, k: int, part: Regrouped) -> None:
        outer = self._whole.optimizers[k]
        inner = self._whole.optimizers[self._names.optimizers[k].number]
        for g, told in enumerate(part.groups):
            if told is None:
                continue
            groups = [o.param_groups[g] for o in {id(o): o for o in (outer, inner)}.values() if g < len(o.param_groups)]
            options = untold(told, groups[0], self._own)
            for group in groups:
                self._then.append(lambda group=group, options=options: group.update(_without_params(options)))
        states: dict[Tensor, Any] = {}
        group_of = {id(p): group for group in inner.param_groups for p in group["params"]}
        for name, p in held_by(inner, self._names).items():
            if name in part.states:
                get = self._state_tensor(p, group_of[id(p)])
                states[p] = untold(part.states[name], inner.state.get(p), get)
        self._then.append(lambda: (inner.state.clear(), inner.state.update(states)))

    def _state_tensor(self, p: Tensor, group: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any], Any], Tensor]:
        """Where torch itself would put it: beside its parameter, but for counters, unless a kernel reads those."""

        def get(name: str, how: Mapping[str, Any], live: Any) -> Tensor:
            device = p.device
            counter = name.endswith(".step") and not (group.get("capturable") or group.get("fused"))
            if how.get("apart") or (counter and how.get("host")):
                device = torch.device("cpu") if how.get("host") else self._device()
            return self._new(name, device, p, live)

        return get

    # -- and the rest

    def _aim_at_rest(self) -> None:
        own, whole, notes = self._saved.own, self._whole, self._restored.notes
        if len(own["schedulers"]) != len(whole.schedulers):
            raise DoesNotFit(
                f"{self._saved.where} was saved with {len(own['schedulers'])} schedulers, and {len(whole.schedulers)}"
                " are there. Hand in the same ones, in the same order"
            )
        for thing, told in zip(whole.schedulers, own["schedulers"], strict=True):
            self._aim_at(thing, told)
        for name, thing in whole.extra.items():
            if name in own["extra"]:
                self._aim_at(thing, own["extra"][name])
            else:
                notes.append(f"extra[{name!r}] was not saved, and stays as it is")
        notes += [
            f"extra[{name!r}] was saved, and is not there now" for name in own["extra"] if name not in whole.extra
        ]
        self._aim_at_modules(own.get("modules", {}))
        self._aim_at_scaler(untold(own.get("scaler"), None, self._own))
        self._restored.guard = untold(own.get("guard"), None, self._own)
        self._restored.probe = untold(own.get("probe"), None, self._own)
        self._restored.hash = str(own.get("hash", "")) if self._saved.same_world else ""

    def _aim_at(self, thing: Any, told: Any) -> None:
        """Give a thing its state; what JSON could not hold, it keeps."""
        stateful = isinstance(thing, Stateful)
        live = None
        if has_any(told, ("$left_out", "$nested")):
            live = thing.state_dict() if stateful else thing.get_state()
        state = untold(told, live, self._own)
        self._then.append(lambda: (thing.load_state_dict if stateful else thing.set_state)(_settled(state)))

    def _aim_at_modules(self, told: Mapping[str, Any]) -> None:
        """Modules with a state of their own making take that themselves."""
        makers, notes = self._names.makers, self._restored.notes
        for name, module in makers.items():
            if name in told:
                live = module.get_extra_state() if has_any(told[name], ("$left_out", "$nested")) else None
                state = untold(told[name], live, self._own)
                self._then.append(lambda module=module, state=state: module.set_extra_state(_settled(state)))
            else:
                notes.append(f"the extra state of {name} was not saved, and stays as it is")
        notes += [f"the extra state of {name} was saved, and no module takes it now" for name in told.keys() - makers]

    def _aim_at_chance(self, told: Mapping[str, Any]) -> None:
        if self._saved.rank >= len(self._saved.told):
            return  # there was no such process
        live = random_states({t.device for t in self._names.tensors.values() if t.is_cuda})
        now, put = chances(live), chances([(put, put) for put, _ in live])
        for name in now.keys() & told.keys():
            state = untold(told[name], now[name], self._own)
            self._then.append(lambda put=put[name], state=state: put(state))
        if now.keys() != told.keys():
            self._restored.notes.append("random numbers were saved of other devices than there are")

    def _aim_at_scaler(self, kept: Any) -> None:
        scaler: Any = self._whole.scaler
        at_work = scaler is not None and scaler.is_enabled()
        if bool(kept) != at_work:
            was, now = ("with", "without") if kept else ("without", "with")
            self._restored.notes.append(f"saved {was} a loss scaler at work, and loaded {now} one")
        if not kept or not at_work:
            return
        self._then.append(lambda: _put_scaler(scaler, kept))


def _put_scaler(scaler: Any, kept: Mapping[str, Any]) -> None:
    for name in ("_growth_factor", "_backoff_factor", "_growth_interval"):
        setattr(scaler, name, kept[name])
    if kept["_scale"] is None:
        return
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    for name in ("_scale", "_growth_tracker"):
        getattr(scaler, name).copy_(kept[name])


def _settled(state: Any) -> Any:
    """Objects within a state get theirs, now that tensors are filled."""
    if isinstance(state, Nested):
        state.owner.load_state_dict(_settled(state.state))
        return state.owner
    if type(state) is dict:
        return {k: _settled(v) for k, v in state.items()}
    return type(state)(_settled(v) for v in state) if type(state) in (list, tuple) else state


def _without_params(options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "params"}


def _serves(live: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, spread: Any) -> bool:
    """Whether a tensor that is there can take what is saved."""
    if (tuple(live.shape), live.dtype, live.device) != (shape, dtype, device) or _overlaps(live) or live.is_meta:
        return False
    if not isinstance(live, DTensor):
        return spread is None and live.layout is torch.strided
    return spread is not None and live.placements == spread.placements and live.device_mesh == spread.device_mesh


def _overlaps(tensor: Tensor) -> bool:
    """Whether one value in memory stands for many."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return any(stride == 0 and size > 1 for size, stride in zip(part.shape, part.stride(), strict=True))


def _copy(live: Tensor, found: Tensor) -> None:
    if isinstance(live, DTensor) or not _overlaps(live):
        live.copy_(found)
        return
    for d, (size, stride) in enumerate(zip(live.shape, live.stride(), strict=True)):
        if stride == 0 and size > 1:
            live, found = live.narrow(d, 0, 1), found.narrow(d, 0, 1)
    live.copy_(found)

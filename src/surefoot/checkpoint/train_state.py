"""What a whole run consists of in memory: found, copied, and put back in place to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from surefoot.checkpoint.copies import Copy, Look
from surefoot.checkpoint.restore import Return
from surefoot.checkpoint.rng import random_states, set_random_states
from surefoot.checkpoint.scaler import freeze_scaler, thaw_scaler
from surefoot.checkpoint.snapshot_memory import Home, choose_home
from surefoot.checkpoint.tree import Slot, Stateful, freeze, thaw

__all__ = ["Copy", "Look", "Stateful", "TrainState", "choose_home"]


@runtime_checkable
class Generator(Protocol):
    """A source of random numbers, such as torch.Generator."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


class StepChanges(Protocol):
    """What an optimizer's own step changes besides weights and state."""

    @property
    def moving(self) -> AbstractSet[str]: ...

    @property
    def attributes(self) -> AbstractSet[str]: ...


class _Nothing(NamedTuple):
    moving: AbstractSet[str] = frozenset()
    attributes: AbstractSet[str] = frozenset()


_NONE = _Nothing()


class Place(NamedTuple):
    """Where a module keeps a parameter or a buffer."""

    root: int
    module: str
    name: str
    slot: Slot
    buffer: bool


@dataclass(frozen=True, slots=True)
class Frozen:
    """Everything of a run but its tensors, for which it has slots."""

    places: list[Place]
    loose: list[tuple[Tensor, Slot]]
    """Parameters that only an optimizer holds."""
    groups: list[list[dict[str, Any]]]
    """Options of each optimizer's parameter groups."""
    own: list[AbstractSet[str] | None]
    """Names of the options that go back, those that each optimizer's own step changes; None where all of them do."""
    attributes: list[dict[str, Any]]
    """Plain attributes of each optimizer; those that its own step changes go back."""
    states: list[dict[Any, Any]]
    schedulers: list[Any]
    scaler: Any
    extra: dict[str, Any]
    chance: list[tuple[Any, Any]]
    made: dict[tuple[int, str], Any]
    """States of modules' own making, by the number of the root and the path in it."""


class CannotGoBack(RuntimeError):
    """The run has changed too much since the state was taken; nothing was written."""


class TrainState:
    """A run: its model and optimizers, and whatever else has to go back with them.

    Call it between a step and the next forward pass, and put back at the point of the loop at which you took: what
    the loop does from there on, such as a scheduler's step, it does again. Gradients belong to no state; they are gone
    after `put_back`. Of modules in `extra`, such as averaged weights, parameters and buffers are taken as the model's.
    With `groups` false the options of parameter groups, such as the rate, stay what the loop has made of them: a
    schedule that does not go back itself must find them where it left them. What the optimizer's own step changes, as
    `changes` has it, goes back in any case.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        scaler: Any = None,
        extra: Mapping[str, Stateful | Generator] | None = None,
        groups: bool = True,
    ) -> None:
        given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        inner = [getattr(o, "optim", None) for o in given]  # where ZeroRedundancyOptimizer keeps its state
        self.optimizers: list[Optimizer] = given + [o for o in inner if isinstance(o, Optimizer)]
        several = isinstance(scheduler, Sequence)
        self.schedulers: list[Stateful] = list(scheduler) if several else [] if scheduler is None else [scheduler]
        self.scaler = scaler
        """May be told later, when it is found."""
        self._groups = groups
        self.changes: Mapping[int, StepChanges] = {}
        """By the identity of an optimizer, what its own step changes."""
        extra = extra or {}
        for name, thing in extra.items():
            if not isinstance(thing, Stateful | Generator):
                raise TypeError(
                    f"extra[{name!r}] must have state_dict and load_state_dict, or get_state and set_state; "
                    f"{type(thing).__name__} has neither"
                )
        self.roots = [model, *(thing for thing in extra.values() if isinstance(thing, nn.Module))]
        self.root_names = ["model", *(f"extra.{n}" for n, thing in extra.items() if isinstance(thing, nn.Module))]
        self.extra = {name: thing for name, thing in extra.items() if not isinstance(thing, nn.Module)}

    # -- there

    def take(self, into: Copy | None = None, *, home: Home = "device") -> Copy:
        """Copy everything, with the memory of `into` wherever it fits."""
        return self.keep(self.look(), into, home=home)

    @torch.no_grad()
    def look(self) -> Look:
        """Find everything there is now."""
        look = Look()
        modules = list(self._modules())
        places = list(_places(modules, look, {id(p) for p in self._held()}))
        loose = [(p, look.steady_slot(p)) for p in self._held() if p not in look and not is_lazy(p)]
        look.frozen = Frozen(
            places,
            loose,
            groups=[[freeze(_values(group), look.slot) for group in o.param_groups] for o in self.optimizers],
            own=[None if self._groups else self._changes(o).moving for o in self.optimizers],
            attributes=[{k: v for k, v in vars(o).items() if type(v) in (int, float, bool)} for o in self.optimizers],
            states=[freeze(o.state, look.steady_slot) for o in self.optimizers],
            schedulers=[freeze(s.state_dict(), look.slot) for s in self.schedulers],
            scaler=freeze_scaler(self.scaler, look.slot),
            extra={name: freeze(_state_of(thing), look.slot) for name, thing in self.extra.items()},
            chance=random_states(look.devices),
            made={
                (root, path): freeze(module.get_extra_state(), look.slot)
                for root, path, module in modules
                if has_own_state(module)
            },
        )
        return look

    def keep(self, look: Look, into: Copy | None = None, *, home: Home = "device") -> Copy:
        """Copy what was found."""
        copy = into if into is not None and into.home == home else Copy(home)
        copy.store(look)
        return copy

    def _changes(self, optimizer: Optimizer) -> StepChanges:
        return self.changes.get(id(optimizer), _NONE)

    def _held(self) -> Iterator[Tensor]:
        return (p for o in self.optimizers for group in o.param_groups for p in group["params"])

    def _modules(self) -> Iterator[tuple[int, str, nn.Module]]:
        for root, model in enumerate(self.roots):
            found = list(model.named_modules())
            for _, module in found:
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward pass without a backward leaves weights gathered: they would go stale
            for name, module in found:
                yield root, name, module

    # -- and back

    @torch.no_grad()
    def put_back(self, copy: Copy) -> None:
        """Make everything as it was, in the tensors that are there now."""
        kept: Frozen = copy.frozen
        copy.settle()
        back = Return(copy)
        self._put_back_modules(kept, back)
        for name, thing in self.extra.items():
            state = thaw(kept.extra[name], None, back.tensor)
            thing.load_state_dict(state) if isinstance(thing, Stateful) else thing.set_state(state)
        for scheduler, state in zip(self.schedulers, kept.schedulers, strict=True):
            scheduler.load_state_dict(thaw(state, None, back.tensor))
        for k, (optimizer, state) in enumerate(zip(self.optimizers, kept.states, strict=True)):
            own = kept.own[k]
            for group, values in zip(optimizer.param_groups, kept.groups[k], strict=False):  # one may have been added
                values = values if own is None else {name: v for name, v in values.items() if name in own}
                group.update({name: thaw(v, group.get(name), back.tensor) for name, v in values.items()})
                for name in own or ():
                    if name not in values:
                        group.pop(name, None)  # the first step makes some
            for name in self._changes(optimizer).attributes & kept.attributes[k].keys():
                setattr(optimizer, name, kept.attributes[k][name])
            thawed = thaw(state, optimizer.state, back.tensor)
            if thawed is not optimizer.state:  # of one that wraps another it cannot be set
                optimizer.state = thawed
        made = {key: thaw(state, None, back.tensor) for key, state in kept.made.items()}
        settle_scaler = thaw_scaler(self.scaler, kept.scaler, back.tensor)
        back.write()
        settle_scaler()
        for root, path, module in self._modules():
            if (root, path) in made:
                module.set_extra_state(made[root, path])
        self._drop_gradients()
        set_random_states(kept.chance)

    def _put_back_modules(self, kept: Frozen, back: Return) -> None:
        """Parameters are never replaced, so nothing at all is written before each of them is known to fit."""
        modules = {(root, name): module for root, name, module in self._modules()}
        amiss = [f"parameter {i} of an optimizer" for i, (p, slot) in enumerate(kept.loose) if not back.into(slot, p)]
        lost: list[tuple[nn.Module, Place]] = []
        for place in kept.places:
            module = modules.get((place.root, place.module))
            held = {} if module is None else module._buffers if place.buffer else module._parameters
            live = held.get(place.name)
            if live is not None and not is_lazy(live) and back.into(place.slot, live):
                continue
            if not place.buffer:
                amiss.append(f"{place.module}.{place.name}".lstrip("."))
            elif module is not None:
                lost.append((module, place))
        if amiss:
            raise CannotGoBack(f"cannot go back: {', '.join(amiss[:5])} changed shape or type, or went, since then")
        for module, place in lost:
            # A cache that has grown since stays: the module's own counters know its length.
            if place.name not in module._non_persistent_buffers_set or module._buffers.get(place.name) is None:
                module._buffers[place.name] = back.tensor(place.slot, None)

    def _drop_gradients(self) -> None:
        for p in itertools.chain(*(root.parameters() for root in self.roots), self._held()):
            p.grad = None


def _places(modules: Sequence[tuple[int, str, nn.Module]], look: Look, held: AbstractSet[int]) -> Iterator[Place]:
    """Where everything is; `held` are the identities of the parameters that optimizers hold."""
    for root, path, module in modules:
        for name, p in module._parameters.items():
            if p is None or is_lazy(p):
                continue
            frozen = not p.requires_grad and id(p) not in held
            slot = look.slot(p, steady=root == 0)
            if frozen and slot not in look.frozen_params:
                look.frozen_params[slot] = p, f"{path}.{name}".lstrip(".")
            yield Place(root, path, name, slot, buffer=False)
        for name, b in module._buffers.items():
            if b is not None and not is_lazy(b):
                yield Place(root, path, name, look.slot(b), buffer=True)


def has_own_state(module: nn.Module) -> bool:
    """Whether a module has a state beside its parameters and buffers, as torch lets it."""
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state and kind.set_extra_state is not nn.Module.set_extra_state
    )


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _state_of(thing: Stateful | Generator) -> Any:
    return thing.state_dict() if isinstance(thing, Stateful) else thing.get_state()

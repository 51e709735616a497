"""The complete state of a run in memory: collected, copied, and restored in place bit for bit."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from surefoot.checkpoint.copies import LiveState, StateCopy, WriteBack
from surefoot.checkpoint.rng import get_rng_states, set_rng_states
from surefoot.checkpoint.snapshot_memory import Location
from surefoot.checkpoint.tree import Stateful, TensorSlot, attach_tensors, detach_tensors

_SCALER_OPTIONS = ("_growth_factor", "_backoff_factor", "_growth_interval")
_SCALER_TENSORS = ("_scale", "_growth_tracker")

log = logging.getLogger("surefoot")


@runtime_checkable
class RandomGenerator(Protocol):
    """A random number generator, such as torch.Generator."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


class StepChanges(Protocol):
    """What an optimizer's own step changes besides weights and state."""

    @property
    def moving(self) -> AbstractSet[str]:
        """Names of options of its parameter groups."""
        ...

    @property
    def attributes(self) -> AbstractSet[str]: ...


class _NoChanges(NamedTuple):
    moving: AbstractSet[str] = frozenset()
    attributes: AbstractSet[str] = frozenset()


_NO_CHANGES = _NoChanges()


class TensorPlace(NamedTuple):
    """The module and name that hold a parameter or a buffer."""

    root: int
    module: str
    name: str
    slot: TensorSlot
    buffer: bool


@dataclass(frozen=True, slots=True)
class NonTensorState:
    """All state of a run except its tensors, which are replaced by slots."""

    places: list[TensorPlace]
    optimizer_only_params: list[tuple[Tensor, TensorSlot]]
    """Parameters that only an optimizer holds."""
    param_groups: list[list[dict[str, Any]]]
    """Options of each optimizer's parameter groups."""
    restored_options: list[AbstractSet[str] | None]
    """Names of the options to restore, those that each optimizer's own step changes; None to restore all."""
    attributes: list[dict[str, Any]]
    """Plain attributes of each optimizer; those that its own step changes are restored."""
    optimizer_states: list[dict[Any, Any]]
    schedulers: list[Any]
    scaler: Any
    extra: dict[str, Any]
    rng_states: list[tuple[Any, Any]]
    module_extra_states: dict[tuple[int, str], Any]
    """Results of `get_extra_state`, by the index of the root and the path of the module in it."""


class RestoreError(RuntimeError):
    """The run has changed too much since the state was captured; nothing was written."""


class TrainState:
    """The model and optimizers of a run, and whatever else has to be restored with them.

    Capture between an optimizer step and the next forward pass, and restore at the same point of the loop: what the
    loop does from there, such as a scheduler step, it does again. Gradients are not part of the state; `restore` drops
    them. Modules in `extra`, such as averaged weights, are treated like the model. With `groups=False` the options of
    parameter groups, such as the lr, keep their current values, because a schedule that is not restored itself must
    find them where it left them; options that the optimizer's own step changes (`step_changes`) are always restored.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        scaler: Any = None,
        extra: Mapping[str, Stateful | RandomGenerator] | None = None,
        groups: bool = True,
    ) -> None:
        outer = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        inner = [getattr(o, "optim", None) for o in outer]  # where ZeroRedundancyOptimizer keeps its state
        self.optimizers: list[Optimizer] = outer + [o for o in inner if isinstance(o, Optimizer)]
        several = isinstance(scheduler, Sequence)
        self.schedulers: list[Stateful] = list(scheduler) if several else [] if scheduler is None else [scheduler]
        self.scaler = scaler
        """May be set later, when a scaler is found."""
        self._restore_groups = groups
        self.step_changes: Mapping[int, StepChanges] = {}
        """What each optimizer's own step changes, by the `id` of the optimizer."""
        extra = extra or {}
        for name, item in extra.items():
            if not isinstance(item, Stateful | RandomGenerator):
                raise TypeError(
                    f"extra[{name!r}] must have state_dict and load_state_dict, or get_state and set_state; "
                    f"{type(item).__name__} has neither"
                )
        self.roots = [model, *(item for item in extra.values() if isinstance(item, nn.Module))]
        self.root_names = ["model", *(f"extra.{n}" for n, item in extra.items() if isinstance(item, nn.Module))]
        self.extra = {name: item for name, item in extra.items() if not isinstance(item, nn.Module)}

    # -- capture

    def capture(self, into: StateCopy | None = None, *, location: Location = "device") -> StateCopy:
        """Copy everything, reusing the memory of `into` where it fits."""
        return self.copy(self.collect(), into, location=location)

    @torch.no_grad()
    def collect(self) -> LiveState:
        """Collect references to all current state."""
        live = LiveState()
        modules = list(self._modules())
        places = list(_tensor_places(modules, live, {id(p) for p in self._optimizer_params()}))
        live.rest = NonTensorState(
            places,
            optimizer_only_params=[
                (p, live.optimizer_slot(p)) for p in self._optimizer_params() if p not in live and not is_lazy(p)
            ],
            param_groups=[
                [detach_tensors(_group_options(group), live.slot) for group in o.param_groups] for o in self.optimizers
            ],
            restored_options=[None if self._restore_groups else self._changes_of(o).moving for o in self.optimizers],
            attributes=[{k: v for k, v in vars(o).items() if type(v) in (int, float, bool)} for o in self.optimizers],
            optimizer_states=[detach_tensors(o.state, live.optimizer_slot) for o in self.optimizers],
            schedulers=[detach_tensors(s.state_dict(), live.slot) for s in self.schedulers],
            scaler=capture_scaler(self.scaler, live.slot),
            extra={name: detach_tensors(_get_state(item), live.slot) for name, item in self.extra.items()},
            rng_states=get_rng_states(live.devices),
            module_extra_states={
                (root, path): detach_tensors(module.get_extra_state(), live.slot)
                for root, path, module in modules
                if has_extra_state(module)
            },
        )
        return live

    def copy(self, live: LiveState, into: StateCopy | None = None, *, location: Location = "device") -> StateCopy:
        """Copy what was collected."""
        copy = into if into is not None and into.location == location else StateCopy(location)
        copy.copy_from(live)
        return copy

    def _changes_of(self, optimizer: Optimizer) -> StepChanges:
        return self.step_changes.get(id(optimizer), _NO_CHANGES)

    def _optimizer_params(self) -> Iterator[Tensor]:
        return (p for o in self.optimizers for group in o.param_groups for p in group["params"])

    def _modules(self) -> Iterator[tuple[int, str, nn.Module]]:
        for root, model in enumerate(self.roots):
            modules = list(model.named_modules())
            for _, module in modules:
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward pass without a backward pass leaves weights gathered, and stale later
            for name, module in modules:
                yield root, name, module

    # -- restore

    @torch.no_grad()
    def restore(self, copy: StateCopy) -> None:
        """Restore everything, in the tensors that exist now."""
        rest: NonTensorState = copy.rest
        copy.wait_on_device()
        back = WriteBack(copy)
        self._restore_modules(rest, back)
        for name, item in self.extra.items():
            state = attach_tensors(rest.extra[name], None, back.tensor_for)
            item.load_state_dict(state) if isinstance(item, Stateful) else item.set_state(state)
        for scheduler, state in zip(self.schedulers, rest.schedulers, strict=True):
            scheduler.load_state_dict(attach_tensors(state, None, back.tensor_for))
        for k, optimizer in enumerate(self.optimizers):
            self._restore_optimizer(optimizer, k, rest, back)
        extra_states = {
            key: attach_tensors(state, None, back.tensor_for) for key, state in rest.module_extra_states.items()
        }
        finish_scaler = restore_scaler(self.scaler, rest.scaler, back.tensor_for)
        back.run()
        finish_scaler()
        for root, path, module in self._modules():
            if (root, path) in extra_states:
                module.set_extra_state(extra_states[root, path])
        self._drop_gradients()
        set_rng_states(rest.rng_states)

    def _restore_optimizer(self, optimizer: Optimizer, k: int, rest: NonTensorState, back: WriteBack) -> None:
        names = rest.restored_options[k]
        for group, options in zip(optimizer.param_groups, rest.param_groups[k], strict=False):  # one may be new
            options = options if names is None else {name: v for name, v in options.items() if name in names}
            group.update({name: attach_tensors(v, group.get(name), back.tensor_for) for name, v in options.items()})
            for name in names or ():
                if name not in options:
                    group.pop(name, None)  # the first step creates some
        for name in self._changes_of(optimizer).attributes & rest.attributes[k].keys():
            setattr(optimizer, name, rest.attributes[k][name])
        state = attach_tensors(rest.optimizer_states[k], optimizer.state, back.tensor_for)
        if state is not optimizer.state:  # an optimizer that wraps another does not allow setting it
            optimizer.state = state

    def _restore_modules(self, rest: NonTensorState, back: WriteBack) -> None:
        """Parameters are never replaced, so nothing is written before all of them are known to fit."""
        modules = {(root, name): module for root, name, module in self._modules()}
        changed = [
            f"parameter {i} of an optimizer"
            for i, (p, slot) in enumerate(rest.optimizer_only_params)
            if not back.write_into(slot, p)
        ]
        lost_buffers: list[tuple[nn.Module, TensorPlace]] = []
        for place in rest.places:
            module = modules.get((place.root, place.module))
            tensors = {} if module is None else module._buffers if place.buffer else module._parameters
            tensor = tensors.get(place.name)
            if tensor is not None and not is_lazy(tensor) and back.write_into(place.slot, tensor):
                continue
            if not place.buffer:
                changed.append(f"{place.module}.{place.name}".lstrip("."))
            elif module is not None:
                lost_buffers.append((module, place))
        if changed:
            raise RestoreError(
                f"cannot restore the state: {', '.join(changed[:5])} changed shape or dtype, or no longer exists"
            )
        for module, place in lost_buffers:
            # A cache that has grown since stays: the module's own counters depend on its length.
            if place.name not in module._non_persistent_buffers_set or module._buffers.get(place.name) is None:
                module._buffers[place.name] = back.tensor_for(place.slot, None)

    def _drop_gradients(self) -> None:
        for p in itertools.chain(*(root.parameters() for root in self.roots), self._optimizer_params()):
            p.grad = None


def _tensor_places(
    modules: Sequence[tuple[int, str, nn.Module]], live: LiveState, optimizer_params: AbstractSet[int]
) -> Iterator[TensorPlace]:
    """The places of all parameters and buffers; `optimizer_params` are the ids of parameters that optimizers hold."""
    for root, path, module in modules:
        for name, p in module._parameters.items():
            if p is None or is_lazy(p):
                continue
            frozen = not p.requires_grad and id(p) not in optimizer_params
            slot = live.slot(p, optimizer_only=root == 0)
            if frozen and slot not in live.frozen_params:
                live.frozen_params[slot] = p, f"{path}.{name}".lstrip(".")
            yield TensorPlace(root, path, name, slot, buffer=False)
        for name, b in module._buffers.items():
            if b is not None and not is_lazy(b):
                yield TensorPlace(root, path, name, live.slot(b), buffer=True)


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module overrides `get_extra_state` and `set_extra_state`."""
    cls = type(module)
    return cls.get_extra_state is not nn.Module.get_extra_state and cls.set_extra_state is not nn.Module.set_extra_state


def _group_options(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _get_state(item: Stateful | RandomGenerator) -> Any:
    return item.state_dict() if isinstance(item, Stateful) else item.get_state()


# -- GradScaler. It steps the optimizer first and updates its scale later, by the infs that the step found. A state
# captured or restored in between has such an update ahead of it, and the infs of the bad step must not reach the
# restored scale. All of this works without reading values on the host.


def capture_scaler(scaler: Any, slot: Callable[[Tensor], TensorSlot]) -> dict[str, Any]:
    """The scaler's state; empty if there is no scaler, or it is disabled."""
    if scaler is None or not scaler.is_enabled():
        return {}
    state = {name: getattr(scaler, name) for name in (*_SCALER_OPTIONS, *_SCALER_TENSORS)}
    return detach_tensors(state | {"found": _found_infs(scaler)}, slot)


def restore_scaler(
    scaler: Any, state: dict[str, Any], tensor: Callable[[TensorSlot, Any], Tensor]
) -> Callable[[], None]:
    """Restore the scaler; returns what is left to do once the tensors are written."""
    if not state:
        return _nothing
    for name in _SCALER_OPTIONS:
        setattr(scaler, name, state[name])
    unused = state["_scale"] is None  # not used yet when the state was captured
    if not unused:
        for name in _SCALER_TENSORS:
            setattr(scaler, name, attach_tensors(state[name], getattr(scaler, name), tensor))
    current, captured = _found_infs(scaler), state["found"]
    for key, found_inf in current.items():
        if key in captured:
            tensor(captured[key], found_inf)

    def finish() -> None:
        if unused and scaler._scale is not None:
            scaler._scale.fill_(scaler._init_scale)
            scaler._growth_tracker.fill_(scaler._init_growth_tracker)
        for key, found_inf in current.items():
            if key not in captured:
                found_inf.zero_()
        if current and not captured:  # the pending update is not part of that state, and counts one good step too many
            scaler._growth_tracker.sub_(1)

    return finish


def _found_infs(scaler: Any) -> dict[tuple[int, Any], Tensor]:
    """The `found_inf` tensors since the last update of the scale, by optimizer and device."""
    states = scaler._per_optimizer_states
    return {(k, device): found for k, s in states.items() for device, found in s["found_inf_per_device"].items()}


def _nothing() -> None:
    pass


def initial_optimizer_state(optimizer: Optimizer) -> dict[Any, Any]:
    """The state that an optimizer of this class with these parameter groups starts with."""
    make: Any = type(optimizer)
    parameters = inspect.signature(make.__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in parameters}
    return dict(make([dict(group) for group in optimizer.param_groups], **options).state)


def reset_optimizer_state(optimizer: Optimizer, *, prefilled: bool) -> None:
    """Clear the state; `prefilled` if the optimizer had one before its first step."""
    try:
        initial = initial_optimizer_state(optimizer) if prefilled else {}
    except Exception as error:  # of a constructor that needs more than parameters
        name = type(optimizer).__name__
        log.warning("surefoot: the state of %s is kept, as it cannot be created again: %s", name, error)
        return
    optimizer.state.clear()
    optimizer.state.update(initial)

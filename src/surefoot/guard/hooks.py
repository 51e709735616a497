"""How the guard hooks into a model: its own errors never end the training, and torch.compile does not trace it."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from surefoot.actions.stop import TrainingStopped
from surefoot.guard import validate
from surefoot.guard.batches import Fetcher, FetchHook, HasFetchHook
from surefoot.guard.context import GuardContext
from surefoot.guard.guard import Guard

log = logging.getLogger("surefoot")
GUARDED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that already have a guard."""


class HasSwitch(Protocol):
    """A guard whose hooks can be switched off."""

    disabled: bool


class CanDisable(HasSwitch, Protocol):
    """A guard that can disable itself after an internal error."""

    def disable(self, error: Exception, where: str) -> None: ...


class LoopHooks(Fetcher, Protocol):
    """A guard that is called when a forward pass begins and ends, and fetches batches."""

    def forward_began(self) -> None: ...

    def forward_ended(self) -> None: ...


P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G", bound=CanDisable)


@contextlib.contextmanager
def switched_off(guard: HasSwitch) -> Iterator[None]:
    """Hooks of the guard do nothing: neither forward passes nor watched losses are the run's."""
    guard.disabled = True
    try:
        yield
    finally:
        guard.disabled = False


def contained(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R | None]:
    """An error inside the method disables the guard, with a log entry, and never ends the training."""

    @functools.wraps(method)
    def wrapper(self: G, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.disabled:
            return None
        try:
            return method(self, *args, **kwargs)
        except (TrainingStopped, validate.Misuse):
            raise
        except Exception as error:
            self.disable(error, method.__name__)
            return None

    return wrapper


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of this function and of everything it calls."""
    disabled = cast(Callable[P, R], torch.compiler.disable(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # The wrapper of torch.compiler.disable costs as much as the hook itself, and is seldom needed.
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return call


class ForwardStartHook:
    """Tells the guard when a forward pass begins; in a copy of the model, saved or deep, it does nothing."""

    of_guard = True
    """`surefoot.locate` leaves it out: its passes are not the run's."""

    def __init__(self, guard: LoopHooks | None = None) -> None:
        self._guard = None if guard is None else weakref.ref(guard)

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_compiling() or self._guard is None:  # a compiler that traces this finds nothing to do
            return
        if (guard := self._guard()) is not None:
            guard.forward_began()

    def __reduce__(self) -> tuple[type[ForwardStartHook], tuple[()]]:
        return type(self), ()


class ForwardEndHook(ForwardStartHook):
    """Tells the guard when a forward pass has ended."""

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_compiling() or self._guard is None:
            return
        if (guard := self._guard()) is not None:
            guard.forward_ended()


def register_hooks(
    guard: LoopHooks, context: GuardContext, *, before_step: Callable[..., Any], after_step: Callable[..., Any]
) -> list[RemovableHandle]:
    """Call the guard from the model, from its optimizers (with the index of each) and from a loader that allows it."""
    hooks = _register_forward_hooks(context.model, guard, ends=context.resume)
    for k, o in enumerate(context.optimizers):
        hooks.append(o.register_step_pre_hook(uncompiled(functools.partial(before_step, k))))
        hooks.append(o.register_step_post_hook(uncompiled(functools.partial(after_step, k))))
        GUARDED.add(o)
    if context.resume and isinstance(context.loader, HasFetchHook):
        context.loader.through = FetchHook(guard)
    return hooks


def _register_forward_hooks(model: nn.Module, guard: LoopHooks, *, ends: bool) -> list[RemovableHandle]:
    """Call the guard when a forward pass begins and, with `ends`, when it has ended."""
    # A mere container, as some GANs use, has no forward: there the loop calls its children.
    modules = [model] if type(model).forward is not nn.Module.forward else list(model.children())
    handles = [m.register_forward_pre_hook(ForwardStartHook(guard), prepend=True) for m in modules]
    if ends:
        handles += [m.register_forward_hook(ForwardEndHook(guard)) for m in modules]
    return handles


def refuse_all_updates(optimizers: Iterable[Optimizer]) -> list[RemovableHandle]:
    """From here on, optimizers step without gradients, which changes neither weights nor state."""
    return [o.register_step_pre_hook(_without_grads) for o in optimizers]


def _without_grads(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)

    def drop_grads() -> Any:
        result = None if closure is None else closure()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        return result

    if closure is None:
        drop_grads()
        return None
    return (*args[:1], drop_grads, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}


def close_if_alive(guard: weakref.ref[Guard]) -> None:
    """Close the guard at the exit of the process; a signal that came meanwhile has nothing left to end."""
    alive = guard()
    if alive is not None:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            alive.close()


def call_listeners(listeners: list[Callable[[int, int], None]], step: int, attempt: int) -> None:
    """Call the user's listeners; one that raises is removed."""
    for listener in list(listeners):
        try:
            listener(step, attempt)
        except Exception as error:
            listeners.remove(listener)
            log.error("surefoot: a listener of on_rewind failed and is removed: %s", error, exc_info=error)

"""How a guard hangs on a model: an error of its own never ends the training, and no compiler trips over it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import nn

from surefoot.actions.stop import TrainingStopped
from surefoot.guard import validate
from surefoot.guard.guard import Guard


class Losable(Protocol):
    """What may break inside, and then stands aside."""

    lost: bool

    def lose(self, error: Exception, where: str) -> None: ...


class Timed(Protocol):
    """What wants to know when a forward pass begins."""

    def forward_began(self) -> None: ...

    def forward_ended(self) -> None: ...


P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", bound=Losable)


def contained(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R | None]:
    """An error inside the guard ends the protection, loudly, and never the training."""

    @functools.wraps(method)
    def wrapper(self: L, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.lost:
            return None
        try:
            return method(self, *args, **kwargs)
        except (TrainingStopped, validate.Misuse):
            raise
        except Exception as error:
            self.lose(error, method.__name__)
            return None

    return wrapper


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The compiler leaves this function alone, and what it calls."""
    alone = cast(Callable[P, R], torch.compiler.disable(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # To tell the compiler costs as much as what is done here, and there is seldom one at work.
        return alone(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return call


class Timing:
    """Tells when a forward pass begins; a copy of the model, saved or deep, carries an idle one."""

    def __init__(self, guard: Timed | None = None) -> None:
        self._guard = None if guard is None else weakref.ref(guard)

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_compiling() or self._guard is None:  # a compiler that traces this finds nothing to do
            return
        guard = self._guard()
        if guard is not None:
            self.tell(guard)

    def tell(self, guard: Timed) -> None:
        guard.forward_began()

    def __reduce__(self) -> tuple[type[Timing], tuple[()]]:
        return type(self), ()


class EndTiming(Timing):
    """Tells when a forward pass has ended."""

    def tell(self, guard: Timed) -> None:
        guard.forward_ended()


def called_by_loop(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward a loop calls: the model, or the parts of one that only holds them, as a GAN's may."""
    return [model] if type(model).forward is not nn.Module.forward else list(model.children())


def close_if_alive(guard: weakref.ref[Guard]) -> None:
    """At the end of the process, which a signal need not ask for any more."""
    alive = guard()
    if alive is not None:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            alive.close()

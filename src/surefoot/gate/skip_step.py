"""A step that is refused before it begins does not run at all, as when a GradScaler skips one.

An optimizer that finds no gradients still counts the step, may move weights by other means, or raises an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_PLAIN = (int, float, bool, str, type(None))


class StepRefused(BaseException):
    """Leads out of an optimizer's step; never seen outside of `SkippableStep`."""

    def __init__(self, optimizer: Optimizer, result: Any = None) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.result = result


class SkippableStep:
    """Wraps `step` of one optimizer so that it can be left on the way."""

    def __init__(self, optimizer: Optimizer, refused: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._depth = 0
        inner = optimizer.step
        before = vars(optimizer).get("step")
        told = getattr(inner, "__func__", inner)  # a scheduler leaves its mark on the step and looks for it later

        @functools.wraps(told)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            self._depth += 1
            try:
                return inner(*args, **kwargs)
            except StepRefused as left:
                if left.optimizer is not optimizer:
                    raise
                refused()
                return left.result
            finally:
                self._depth -= 1

        self._inner, self._before = inner, before
        self._own = MethodType(step, optimizer)
        optimizer.step = self._own

    @property
    def active(self) -> bool:
        """Whether the step that runs now was called through this: one that was kept from before `attach` was not."""
        return self._depth > 0

    def close(self) -> None:
        """Take the wrapper off again; one that others have wrapped since stays, and does nothing."""
        if vars(self._optimizer).get("step") is self._own:
            if self._before is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._before


class StepOptions:
    """Entries of the parameter groups, and plain attributes, that an optimizer's own step changes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.moving: set[str] = set()
        """Names of entries that the step was seen to change, such as a counter of steps."""
        self.attributes: set[str] = set()
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._versions: list[dict[str, int]] = []
        self._plain: dict[str, Any] = {}

    def before(self) -> None:
        """A step is about to begin."""
        self._groups = [(group, {k: _held(v) for k, v in group.items()}) for group in self._optimizer.param_groups]
        self._versions = [{k: v._version for k, v in held.items() if isinstance(v, Tensor)} for _, held in self._groups]
        self._plain = {k: v for k, v in vars(self._optimizer).items() if type(v) in _PLAIN}

    def after(self) -> None:
        """The step is over and was not refused: learn what it has changed."""
        for (group, was), versions in zip(self._groups, self._versions, strict=True):
            for name, value in group.items():
                if name != "params" and _differs(was.get(name, self), value, versions.get(name)):
                    self.moving.add(name)
            if "initial_lr" in group:  # a scheduler's, and it may have stepped in a hook
                self.moving.discard("lr")
        now = vars(self._optimizer)
        self.attributes |= {k for k, v in self._plain.items() if k in now and type(now[k]) in _PLAIN and now[k] != v}
        self._forget()

    def restore(self) -> None:
        """The step was refused: nothing it has changed stays, but for tensors that it has written to."""
        for group, was in self._groups:
            for name in [name for name in group if name not in was]:
                del group[name]
            group.update({name: value for name, value in was.items() if name != "params"})
        for name, value in self._plain.items():
            if type(getattr(self._optimizer, name, None)) in _PLAIN and getattr(self._optimizer, name) != value:
                setattr(self._optimizer, name, value)
        self._forget()

    def _forget(self) -> None:
        self._groups, self._versions, self._plain = [], [], {}


def _held(value: Any) -> Any:
    return list(value) if type(value) is list else value


def _differs(was: Any, now: Any, version: int | None) -> bool:
    if was is now:
        return isinstance(now, Tensor) and now._version != version
    if isinstance(was, Tensor) or isinstance(now, Tensor):
        return True
    try:
        return bool(was != now)
    except (RuntimeError, ValueError):  # a container of tensors
        return False

"""Watches every loss that a loop hands to its library's `backward`."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from surefoot.guard.guard import Guard
from surefoot.integrations.trainer_options import Replaced
from surefoot.records import Event


class WatchedBackward:
    """Until the guard is closed, `owner.backward(loss)` watches the loss, unless the loop has watched one itself."""

    def __init__(self, guard: Guard, owner: Any, name: str) -> None:
        self._watch = guard.watch
        self._watched_by_loop = False
        self.replaced = Replaced()
        """Put back when the guard is closed."""
        self.replaced.set(guard, "watch", self._watch_for_loop)
        backward = getattr(owner, name)
        self.replaced.set(owner, name, functools.wraps(backward)(functools.partial(self._backward, backward)))
        guard.on_event(self._on_event)

    def _watch_for_loop(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._watched_by_loop = loss.requires_grad
        return self._watch(loss, *args, **kwargs)

    def _backward(self, backward: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._watched_by_loop:
            self._watch(loss)
        self._watched_by_loop = False
        return backward(loss, *args, **kwargs)

    def _on_event(self, event: Event) -> None:
        if event.as_json().get("name") == "closed":
            self.replaced.undo()

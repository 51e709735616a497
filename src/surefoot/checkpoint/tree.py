"""Nested state taken apart and put together again: tensors go into numbered slots, the rest is copied."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from surefoot.checkpoint.tensor_subclasses import Wrapped, is_wrapper, put_together, take_apart

_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})


@runtime_checkable
class Stateful(Protocol):
    """Anything that hands out its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Slot(int):
    """Stands where a tensor stood, and says which one."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Nested:
    """An object inside a state, such as the scheduler after a warmup: copied, it would bring its optimizer along."""

    owner: Stateful
    state: Any


def freeze(value: Any, slot: Callable[[Tensor], Slot]) -> Any:
    """The same nesting with a slot for every tensor, and nothing in it that the run goes on changing."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return take_apart(value, lambda part: freeze(part, slot)) if is_wrapper(value) else slot(value)
    if isinstance(value, dict):
        items = {k: freeze(v, slot) for k, v in value.items()}
        return items if type(value) is dict else _refilled(copy.copy(value), items)
    if isinstance(value, list | deque | tuple):
        return _sequence(value, [freeze(v, slot) for v in value])
    if isinstance(value, Stateful) and not isinstance(value, type):
        return Nested(value, freeze(value.state_dict(), slot))
    return _own(value)


def thaw(frozen: Any, live: Any, tensor: Callable[[Slot, Any], Tensor]) -> Any:
    """What was frozen, in the containers and tensors `live` has now wherever those are of the same kind."""
    if type(frozen) in _PLAIN:
        return frozen
    if isinstance(frozen, Slot | Wrapped):
        wrapped = isinstance(frozen, Wrapped)
        return put_together(frozen, live, lambda v, now: thaw(v, now, tensor)) if wrapped else tensor(frozen, live)
    if isinstance(frozen, Nested):
        frozen.owner.load_state_dict(thaw(frozen.state, None, tensor))
        return frozen.owner
    same = type(live) is type(frozen)
    if isinstance(frozen, dict):
        items = {k: thaw(v, live.get(k) if same else None, tensor) for k, v in frozen.items()}
        return _refilled(live if same else copy.copy(frozen), items)
    if isinstance(frozen, list | deque | tuple):
        now = itertools.chain(live if same else (), itertools.repeat(None))
        parts = [thaw(v, was, tensor) for v, was in zip(frozen, now, strict=False)]
        return _refilled_list(live, parts) if same and not isinstance(live, tuple) else _sequence(frozen, parts)
    return _own(frozen)


def _refilled(mapping: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    mapping.clear()
    for k, v in items.items():
        mapping[k] = v
    return mapping


def _refilled_list(held: Any, parts: list[Any]) -> Any:
    held.clear()
    held.extend(parts)
    return held


def _sequence(like: Any, parts: list[Any]) -> Any:
    """A sequence of the same class, also where that has names or a greatest length."""
    if isinstance(like, tuple):
        make = getattr(like, "_make", type(like))
        return make(parts)
    return _refilled_list(copy.copy(like), parts)


def _own(value: Any) -> Any:
    """A copy of anything else; what cannot be copied, such as a process group, is no state either."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value

"""Nested state without its tensors: tensors are replaced by numbered slots, everything else is copied."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})


@runtime_checkable
class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class TensorSlot(int):
    """The number of the tensor that belongs in this place."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NestedState:
    """A Stateful inside a state, such as the scheduler after a warmup: copying it would copy its optimizer too."""

    owner: Stateful
    state: Any


@dataclass(frozen=True, slots=True)
class WrapperTensor:
    """A tensor subclass made of plain tensors, such as an 8-bit optimizer state: how to rebuild it, and its parts."""

    cls: type[Any]
    context: Any
    size: Any
    stride: Any
    parts: dict[str, Any]


def detach_tensors(value: Any, slot: Callable[[Tensor], TensorSlot]) -> Any:
    """The same nesting with a slot for every tensor, and copies of everything that the run may still change."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return flatten_wrapper(value, lambda part: detach_tensors(part, slot)) if is_wrapper(value) else slot(value)
    if isinstance(value, dict):
        items = {k: detach_tensors(v, slot) for k, v in value.items()}
        return items if type(value) is dict else _refill_dict(copy.copy(value), items)
    if isinstance(value, list | deque | tuple):
        return _same_sequence(value, [detach_tensors(v, slot) for v in value])
    if isinstance(value, Stateful) and not isinstance(value, type):
        return NestedState(value, detach_tensors(value.state_dict(), slot))
    return _deep_copy(value)


def attach_tensors(detached: Any, live: Any, tensor: Callable[[TensorSlot, Any], Tensor]) -> Any:
    """The inverse of `detach_tensors`; reuses the containers and tensors of `live` that have the same type."""
    if type(detached) in _PLAIN:
        return detached
    if isinstance(detached, TensorSlot | WrapperTensor):
        attach = lambda part, now: attach_tensors(part, now, tensor)  # noqa: E731
        return tensor(detached, live) if isinstance(detached, TensorSlot) else unflatten_wrapper(detached, live, attach)
    if isinstance(detached, NestedState):
        detached.owner.load_state_dict(attach_tensors(detached.state, None, tensor))
        return detached.owner
    same = type(live) is type(detached)
    if isinstance(detached, dict):
        items = {k: attach_tensors(v, live.get(k) if same else None, tensor) for k, v in detached.items()}
        return _refill_dict(live if same else copy.copy(detached), items)
    if isinstance(detached, list | deque | tuple):
        current = itertools.chain(live if same else (), itertools.repeat(None))
        parts = [attach_tensors(v, now, tensor) for v, now in zip(detached, current, strict=False)]
        in_place = same and not isinstance(live, tuple)
        return _refill_list(live, parts) if in_place else _same_sequence(detached, parts)
    return _deep_copy(detached)


def _refill_dict(mapping: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    mapping.clear()
    for k, v in items.items():
        mapping[k] = v
    return mapping


def _refill_list(sequence: Any, parts: list[Any]) -> Any:
    sequence.clear()
    sequence.extend(parts)
    return sequence


def _same_sequence(like: Any, parts: list[Any]) -> Any:
    """A sequence of the same class, including named tuples and deques with a maxlen."""
    if isinstance(like, tuple):
        make = getattr(like, "_make", type(like))
        return make(parts)
    return _refill_list(copy.copy(like), parts)


def _deep_copy(value: Any) -> Any:
    """A deep copy, or the value itself: what cannot be copied, such as a process group, is not state either."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


# -- tensor subclasses


def is_wrapper(value: object) -> bool:
    """Whether a tensor is made of others by torch's wrapper protocol; DTensors are handled separately."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and is_traceable_wrapper_subclass(value)


def flatten_wrapper(tensor: Any, detach: Callable[[Any], Any]) -> WrapperTensor:
    """Take a wrapper apart; `detach` is applied to each of its tensors."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: detach(getattr(tensor, name)) for name in names}
    return WrapperTensor(type(tensor), context, tensor.size(), tensor.stride(), parts)


def unflatten_wrapper(wrapper: WrapperTensor, live: Any, attach: Callable[[Any, Any], Any]) -> Any:
    """The live tensor, with its parts written in place, if it still has all of them; otherwise a new tensor."""
    same = type(live) is wrapper.cls and live.__tensor_flatten__()[0] == list(wrapper.parts)
    parts = {name: attach(part, getattr(live, name) if same else None) for name, part in wrapper.parts.items()}
    if same and all(getattr(live, name) is part for name, part in parts.items()):
        return live
    return wrapper.cls.__tensor_unflatten__(parts, wrapper.context, wrapper.size, wrapper.stride)


def find_wrapper_class(name: str) -> Any:
    """The tensor subclass `module:class`; nothing is imported for it, since a file may contain any name."""
    module, _, path = name.partition(":")
    cls: Any = sys.modules.get(module)
    for part in path.split("."):
        cls = getattr(cls, part, None)
    if not isinstance(cls, type) or not issubclass(cls, Tensor) or not hasattr(cls, "__tensor_unflatten__"):
        raise ValueError(f"the tensor subclass {name} is unknown: import {module} before attach")
    return cls


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, and in the fields of dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))

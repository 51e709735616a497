"""Tensor subclasses that are made of plain tensors, such as 8-bit optimizer states: taken apart and put together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A wrapper without its tensors: what it takes to build it again, and what stands for each of them."""

    kind: type[Any]
    context: Any
    size: Any
    stride: Any
    parts: dict[str, Any]


def is_wrapper(value: object) -> bool:
    """Whether this is a tensor made of others by torch's protocol; DTensors are known by other means."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and is_traceable_wrapper_subclass(value)


def take_apart(tensor: Any, freeze: Callable[[Any], Any]) -> Wrapped:
    """The wrapper with each of its tensors frozen."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: freeze(getattr(tensor, name)) for name in names}
    return Wrapped(type(tensor), context, tensor.size(), tensor.stride(), parts)


def put_together(wrapped: Wrapped, live: Any, thaw: Callable[[Any, Any], Any]) -> Any:
    """The live tensor with its parts written in place where it still has all of them, else a new one."""
    same = type(live) is wrapped.kind and live.__tensor_flatten__()[0] == list(wrapped.parts)
    parts = {name: thaw(part, getattr(live, name) if same else None) for name, part in wrapped.parts.items()}
    if same and all(getattr(live, name) is part for name, part in parts.items()):
        return live
    return wrapped.kind.__tensor_unflatten__(parts, wrapped.context, wrapped.size, wrapped.stride)


def known_wrapper(name: str) -> Any:
    """The tensor subclass of this name, `module:class`; nothing is imported for it, since a file may say anything."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, Tensor) or not hasattr(found, "__tensor_unflatten__"):
        raise ValueError(f"the tensor subclass {name} is not known: import {module} before attach")
    return found

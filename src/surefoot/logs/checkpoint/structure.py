"""Where in a loaded object the weights are, where the optimizer's state, and which of its numbers is the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from surefoot.logs.checkpoint.held import FLOATS, Contents, Held, Moments, Numbers, floats
from surefoot.logs.checkpoint.torchfile import Closed

_DEEPEST = 60
_STEPS = ("global_step", "step", "iteration", "iter_num", "iter", "steps", "num_updates", "total_iters", "train_step")
_ASIDE = frozenset({"callbacks", "loops", "lr_schedulers", "lr_scheduler", "scheduler", "metrics", "hyper_parameters"})
"""Where trainers keep what is not a weight."""
_INNER = frozenset({"_modules", "_parameters", "_buffers"})
"""What a whole module keeps its tensors under."""
_SETTINGS = ("lr", "initial_lr", "weight_decay", "momentum")
Path = tuple[str, ...]


def sorted_out(loaded: Any) -> Contents:
    """What is in an object that torch.load gave back."""
    contents = Contents("torch")
    found: list[tuple[Path, Any]] = []
    seen: set[int] = set()
    waiting: list[tuple[Path, Any]] = [((), loaded)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen or len(path) > _DEEPEST:
            continue
        if isinstance(value, Mapping | list | tuple | Closed):
            seen.add(id(value))
        if _is_tensor(value):
            found.append((path, value))
        elif isinstance(value, Mapping) and "param_groups" in value and isinstance(value.get("state"), Mapping):
            _optimizer(contents, value)
        elif isinstance(value, Mapping) and "growth_factor" in value and "scale" in value:
            contents.scale = _number(value["scale"])
        else:
            _plain(contents, path, value)
            waiting += reversed([((*path, *name), inner) for name, inner in _inside(value)])
    _weights(contents, found)
    return contents


def _inside(value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in _ASIDE:
                continue
            yield (() if name in _INNER else (str(name),)), inner
        if inner := getattr(value, "__dict__", None):
            yield (), inner
    elif isinstance(value, list | tuple) and any(not isinstance(one, int | float | str) for one in value[:1000]):
        for index, inner in enumerate(value):
            yield (str(index),), inner
    elif isinstance(value, Closed):
        for inner in value.held:
            yield (), inner


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage") and hasattr(value, "stride")


def _number(value: Any) -> float | None:
    if _is_tensor(value) and value.numel() == 1 and not value.is_complex() and str(value.device) != "meta":
        value = value.item()
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _plain(contents: Contents, path: Path, value: Any) -> None:
    """Steps and losses that stand near the top."""
    if not isinstance(value, Mapping) or len(path) > 1:
        return
    for name in _STEPS:
        number = _number(value.get(name))
        if contents.step is None and number is not None and math.isfinite(number) and number >= 0:
            contents.step = int(number)
    epoch = _number(value.get("epoch"))
    if not path and epoch is not None and math.isfinite(epoch):
        contents.epoch = int(epoch)
    for name, inner in list(value.items())[:1000]:
        if isinstance(name, str) and "loss" in name.lower() and "." not in name:
            number = _number(inner)
            if number is not None:
                contents.losses[name] = number


def _optimizer(contents: Contents, value: Mapping[Any, Any]) -> None:
    for key, state in value["state"].items():
        if not isinstance(state, Mapping):
            continue
        moments = Moments(str(key))
        for name, inner in state.items():
            if name == "step":
                moments.step = _number(inner)
            elif _is_tensor(inner) and (held := _held(contents, str(name), inner)) is not None:
                moments.tensors[str(name)] = held
        contents.moments.append(moments)
    groups = value["param_groups"]
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, Mapping):
            settings = {name: number for name in _SETTINGS if (number := _number(group.get(name))) is not None}
            betas = group.get("betas")
            if isinstance(betas, list | tuple) and len(betas) == 2 and (second := _number(betas[1])) is not None:
                settings["beta2"] = second
            contents.groups.append(settings)


def _weights(contents: Contents, found: list[tuple[Path, Any]]) -> None:
    """Tensors by name; one that stands there twice (tied weights) is looked at once."""
    shared = _shared([path for path, _ in found if path])
    seen: set[tuple[Any, ...]] = set()
    for path, tensor in found:
        name = ".".join(path[shared:]) or "tensor"
        if name.endswith("num_batches_tracked") and (number := _number(tensor)) is not None:
            contents.counters[name] = int(number)
            continue
        held = _held(contents, name, tensor)
        if held is None:
            continue
        place = (tensor.data_ptr(), held.shape, held.dtype)
        if place in seen and held.count:
            continue
        seen.add(place)
        if any("optim" in part.lower() for part in path[:-1]):
            contents.moments.append(Moments(name, {name: held}))
        else:
            contents.weights.append(held)


def _shared(paths: list[Path]) -> int:
    """How many names all paths begin with, none of them a tensor's own."""
    if not paths:
        return 0
    first, last = min(paths), max(paths)
    most = min(len(path) for path in paths) - 1
    return next((at for at in range(most) if first[at] != last[at]), most)


def _held(contents: Contents, name: str, tensor: Any) -> Held | None:
    dtype = str(tensor.dtype).removeprefix("torch.").removesuffix("fn")
    if tensor.is_quantized or "strided" not in str(tensor.layout) or str(tensor.device) != "cpu":
        contents.skipped["quantised, sparse or empty-shell tensors"] += 1
        return None
    if dtype not in FLOATS:
        contents.leave_out(name, dtype, tensor.numel())
        return None
    tensor = tensor.detach()
    stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.numel() > stored:
        # One value stretched over a shape: the shape may be of any size, what is stored is looked at.
        tensor = tensor.as_strided((stored,), (1,), 0)
    shape = tuple(tensor.shape)
    return Held(name, dtype, shape, tensor.numel() * tensor.element_size(), _Parts(tensor, dtype))


class _Parts:
    """The numbers of a tensor of torch, so many at a time; its pages come from the disk as they are needed."""

    def __init__(self, tensor: Any, dtype: str) -> None:
        self._tensor = tensor
        self._dtype = dtype

    def __call__(self, size: int) -> Iterator[Numbers]:
        import torch

        flat = self._tensor.reshape(-1)
        for at in range(0, flat.numel(), size):
            part = flat[at : at + size]
            if self._dtype == "bfloat16":
                raw: Any = part.view(torch.int16).numpy().view(np.uint16)
            elif self._dtype.startswith("float8"):
                raw = part.view(torch.uint8).numpy()
            else:
                raw = part.numpy()
            yield floats(raw, self._dtype)

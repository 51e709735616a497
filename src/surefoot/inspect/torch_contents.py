"""Finds weights, optimizer state and the step inside an object loaded from a torch.save file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from surefoot.inspect.contents import FLOAT_DTYPES, CheckpointContents, Numbers, ParamState, StoredTensor, to_floats
from surefoot.inspect.torch_file import UnloadedObject

_MAX_DEPTH = 60
_STEP_KEYS = (
    "global_step",
    "step",
    "iteration",
    "iter_num",
    "iter",
    "steps",
    "num_updates",
    "total_iters",
    "train_step",
)
_NO_WEIGHTS = frozenset(
    {"callbacks", "loops", "lr_schedulers", "lr_scheduler", "scheduler", "metrics", "hyper_parameters"}
)
"""Keys under which trainers store things other than weights."""
_MODULE_FIELDS = frozenset({"_modules", "_parameters", "_buffers"})
"""Attributes under which a pickled module stores its tensors."""
_SETTINGS = ("lr", "initial_lr", "weight_decay", "momentum")
KeyPath = tuple[str, ...]


def find_contents(loaded: Any) -> CheckpointContents:
    """Sort the object returned by torch.load into weights, optimizer state and plain values."""
    contents = CheckpointContents("torch")
    tensors: list[tuple[KeyPath, Any]] = []
    seen: set[int] = set()
    pending: list[tuple[KeyPath, Any]] = [((), loaded)]
    while pending:
        path, value = pending.pop()
        if id(value) in seen or len(path) > _MAX_DEPTH:
            continue
        if isinstance(value, Mapping | list | tuple | UnloadedObject):
            seen.add(id(value))
        if _is_tensor(value):
            tensors.append((path, value))
        elif isinstance(value, Mapping) and "param_groups" in value and isinstance(value.get("state"), Mapping):
            _add_optimizer(contents, value)
        elif isinstance(value, Mapping) and "growth_factor" in value and "scale" in value:
            contents.loss_scale = _number(value["scale"])
        else:
            _add_plain_values(contents, path, value)
            pending += reversed([((*path, *name), inner) for name, inner in _children(value)])
    _add_weights(contents, tensors)
    return contents


def _children(value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in _NO_WEIGHTS:
                continue
            yield (() if name in _MODULE_FIELDS else (str(name),)), inner
        if inner := getattr(value, "__dict__", None):
            yield (), inner
    elif isinstance(value, list | tuple) and any(not isinstance(item, int | float | str) for item in value[:1000]):
        for index, inner in enumerate(value):
            yield (str(index),), inner
    elif isinstance(value, UnloadedObject):
        for inner in value.contents:
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


def _add_plain_values(contents: CheckpointContents, path: KeyPath, value: Any) -> None:
    """Pick up steps, epochs and losses stored at the top levels."""
    if not isinstance(value, Mapping) or len(path) > 1:
        return
    for name in _STEP_KEYS:
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


def _add_optimizer(contents: CheckpointContents, value: Mapping[Any, Any]) -> None:
    for key, state in value["state"].items():
        if not isinstance(state, Mapping):
            continue
        param = ParamState(str(key))
        for name, inner in state.items():
            if name == "step":
                param.step = _number(inner)
            elif _is_tensor(inner) and (stored := _stored_tensor(contents, str(name), inner)) is not None:
                param.tensors[str(name)] = stored
        contents.optimizer_state.append(param)
    groups = value["param_groups"]
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, Mapping):
            settings = {name: number for name in _SETTINGS if (number := _number(group.get(name))) is not None}
            betas = group.get("betas")
            if isinstance(betas, list | tuple) and len(betas) == 2 and (second := _number(betas[1])) is not None:
                settings["beta2"] = second
            contents.param_groups.append(settings)


def _add_weights(contents: CheckpointContents, tensors: list[tuple[KeyPath, Any]]) -> None:
    """Add tensors under their names; tied weights are added once."""
    shared = _common_prefix([path for path, _ in tensors if path])
    seen: set[tuple[Any, ...]] = set()
    for path, tensor in tensors:
        name = ".".join(path[shared:]) or "tensor"
        if name.endswith("num_batches_tracked") and (number := _number(tensor)) is not None:
            contents.counters[name] = int(number)
            continue
        stored = _stored_tensor(contents, name, tensor)
        if stored is None:
            continue
        place = (tensor.data_ptr(), stored.shape, stored.dtype)
        if place in seen and stored.numel:
            continue
        seen.add(place)
        if any("optim" in part.lower() for part in path[:-1]):
            contents.optimizer_state.append(ParamState(name, {name: stored}))
        else:
            contents.weights.append(stored)


def _common_prefix(paths: list[KeyPath]) -> int:
    """The number of leading keys that all paths share, not counting a tensor's own key."""
    if not paths:
        return 0
    first, last = min(paths), max(paths)
    longest = min(len(path) for path in paths) - 1
    return next((index for index in range(longest) if first[index] != last[index]), longest)


def _stored_tensor(contents: CheckpointContents, name: str, tensor: Any) -> StoredTensor | None:
    dtype = str(tensor.dtype).removeprefix("torch.").removesuffix("fn")
    if tensor.is_quantized or "strided" not in str(tensor.layout) or str(tensor.device) != "cpu":
        contents.skipped["quantised, sparse or meta tensors"] += 1
        return None
    if dtype not in FLOAT_DTYPES:
        contents.skip_integer_tensor(name, dtype, tensor.numel())
        return None
    tensor = tensor.detach()
    storage_numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.numel() > storage_numel:
        # An expanded tensor: its shape may be arbitrarily large, so only the stored values are read.
        tensor = tensor.as_strided((storage_numel,), (1,), 0)
    shape = tuple(tensor.shape)
    return StoredTensor(name, dtype, shape, tensor.numel() * tensor.element_size(), _TensorChunks(tensor, dtype))


class _TensorChunks:
    """Reads the values of a torch tensor in chunks; mmap loads its pages from disk as needed."""

    def __init__(self, tensor: Any, dtype: str) -> None:
        self._tensor = tensor
        self._dtype = dtype

    def __call__(self, size: int) -> Iterator[Numbers]:
        import torch

        flat = self._tensor.reshape(-1)
        for start in range(0, flat.numel(), size):
            chunk = flat[start : start + size]
            if self._dtype == "bfloat16":
                raw: Any = chunk.view(torch.int16).numpy().view(np.uint16)
            elif self._dtype.startswith("float8"):
                raw = chunk.view(torch.uint8).numpy()
            else:
                raw = chunk.numpy()
            yield to_floats(raw, self._dtype)

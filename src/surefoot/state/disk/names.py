"""Names for everything a run holds that stay the same however its model is wrapped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")


def clean(path: str) -> str:
    """A path within a model without what compiling, sharding and recomputation put between."""
    return _WRAPPERS.sub("", path)


@dataclass(slots=True)
class Names:
    """The names of a run's parameters and buffers, each tensor by its first one."""

    of: dict[int, str] = field(default_factory=dict)
    """By the identity of a tensor."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    passing: set[str] = field(default_factory=set)
    """Buffers that a module does not count as its state."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tensors that have one already."""
    places: dict[tuple[int, str, str], str] = field(default_factory=dict)
    """By the number of the root, the path of the module and the name within it."""

    def add(self, name: str, tensor: Tensor, *, buffer: bool = False, passing: bool = False) -> None:
        known = self.of.get(id(tensor))
        if known is not None:
            self.aliases[name] = known
            return
        self.of[id(tensor)] = name
        self.tensors[name] = tensor
        if buffer:
            self.buffers.add(name)
        if passing:
            self.passing.add(name)


def names_of(roots: Iterable[tuple[str, nn.Module]], optimizers: Sequence[Optimizer]) -> Names:
    """Every parameter and buffer of the roots, and the parameters that only an optimizer holds."""
    names = Names()
    for number, (root, model) in enumerate(roots):
        for path, module in model.named_modules(remove_duplicate=False):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    continue
                whole = names.places[number, path, name] = f"{root}.{_within(model, path, name)}"
                buffer = name in module._buffers
                names.add(whole, tensor, buffer=buffer, passing=name in module._non_persistent_buffers_set)
    for k, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in names.of:
                    names.add(f"loose{k}.{g}.{i}", p)
    return names


def _within(model: nn.Module, path: str, name: str) -> str:
    whole = clean(f"{path}.{name}" if path else name)
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        if isinstance(model, DistributedDataParallel):
            whole = whole.removeprefix("module.")
            model = model.module
        else:
            model = model._orig_mod  # pyright: ignore[reportAssignmentType]
    return whole

"""Which tensors are measured, in which order, and how to reach the part of each gradient that this process holds."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

_GRAD = operator.attrgetter("grad")
_PLAIN = frozenset({Tensor, type(None)})


@dataclass(frozen=True, slots=True)
class Layout:
    """The measured tensors, ordered by optimizer and parameter group; those of no optimizer come last."""

    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    groups: tuple[tuple[slice, ...], ...]
    """For each optimizer, the span of each of its parameter groups."""
    sharded: bool
    """Some tensor is only partly held by this process."""

    @property
    def scopes(self) -> tuple[slice, ...]:
        """For each optimizer, the span of all its tensors."""
        return tuple(slice(g[0].start, g[-1].stop) for g in self.groups)

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each tensor, all processes together."""
        return tuple(p.numel() for p in self.params)

    @property
    def local_numels(self) -> tuple[int, ...]:
        """Elements of each tensor that this process holds."""
        return tuple(local(p).numel() for p in self.params)

    def fits(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether the optimizers still hold the parameter groups this layout was made from."""
        if len(optimizers) != len(self.groups):
            return False
        for optimizer, spans in zip(optimizers, self.groups, strict=True):
            if len(optimizer.param_groups) != len(spans):
                return False
            for group, span in zip(optimizer.param_groups, spans, strict=True):
                held, known = group["params"], self.params[span]
                if len(held) != len(known) or not all(map(operator.is_, held, known)):
                    return False
        return True


def layout_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Layout:
    """Lay out every parameter the optimizers hold, then the model's other trainable ones."""
    known = {id(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters()}
    names: list[str] = []
    params: list[Tensor] = []
    groups: list[tuple[slice, ...]] = []
    for number, optimizer in enumerate(optimizers):
        spans: list[slice] = []
        for g, group in enumerate(optimizer.param_groups):
            start = len(params)
            for i, p in enumerate(group["params"]):
                params.append(p)
                names.append(known.get(id(p), f"optimizer{number}.group{g}.{i}"))
            spans.append(slice(start, len(params)))
        groups.append(tuple(spans))
    owned = {id(p) for p in params}
    for p in model.parameters():
        if p.requires_grad and id(p) not in owned:
            params.append(p)
            names.append(known[id(p)])
    sharded = any(isinstance(p, DTensor) for p in params)
    return Layout(tuple(_distinct(names)), tuple(params), tuple(groups), sharded)


def _distinct(names: Sequence[str]) -> Iterator[str]:
    """A parameter held by two optimizers is measured for each of them, under names that differ."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}@{seen[name]}"


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, with values that are final."""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(isinstance(p, Partial) for p in tensor.placements):
        whole = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=whole)
    return tensor.to_local()


def counts_here(tensor: Tensor) -> bool:
    """Whether this process's part of a DTensor is the one that counts, so that each element is counted once."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return all(at == 0 or p.is_shard() for at, p in zip(place, tensor.placements, strict=True))


def gradients(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients as they are now, this process's parts; None where a tensor has none."""
    found: list[Tensor | None] = list(map(_GRAD, params))
    if _PLAIN.issuperset(map(type, found)):  # nearly always, and found out in no time
        return found
    return [g if g is None or type(g) is Tensor else local(g.detach()) for g in found]

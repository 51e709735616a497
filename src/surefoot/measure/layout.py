"""Which tensors are measured and in which order, and how to get this rank's part of each."""

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
class ParamLayout:
    """The measured tensors, ordered by optimizer and parameter group; those of no optimizer come last."""

    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    group_spans: tuple[tuple[slice, ...], ...]
    """For each optimizer, the span of each of its parameter groups."""
    optimizer_spans: tuple[slice, ...]
    """For each optimizer, the span of all its tensors."""
    sharded: bool
    """Whether any tensor is a DTensor."""

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each tensor, over all ranks."""
        return tuple(p.numel() for p in self.params)

    @property
    def local_numels(self) -> tuple[int, ...]:
        """Elements of each tensor on this rank."""
        return tuple(to_local(p).numel() for p in self.params)

    def matches(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether the optimizers still hold the parameter groups this layout was made from."""
        if len(optimizers) != len(self.group_spans):
            return False
        for optimizer, spans in zip(optimizers, self.group_spans, strict=True):
            if len(optimizer.param_groups) != len(spans):
                return False
            for group, span in zip(optimizer.param_groups, spans, strict=True):
                current, known = group["params"], self.params[span]
                if len(current) != len(known) or not all(map(operator.is_, current, known)):
                    return False
        return True


def layout_params(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> ParamLayout:
    """Lay out every parameter of the optimizers, then the model's other trainable parameters."""
    known = {id(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters()}
    names: list[str] = []
    params: list[Tensor] = []
    group_spans: list[tuple[slice, ...]] = []
    for number, optimizer in enumerate(optimizers):
        spans: list[slice] = []
        for g, group in enumerate(optimizer.param_groups):
            start = len(params)
            for i, p in enumerate(group["params"]):
                params.append(p)
                names.append(known.get(id(p), f"optimizer{number}.group{g}.{i}"))
            spans.append(slice(start, len(params)))
        group_spans.append(tuple(spans))
    optimized = {id(p) for p in params}
    for p in model.parameters():
        if p.requires_grad and id(p) not in optimized:
            params.append(p)
            names.append(known[id(p)])
    sharded = any(isinstance(p, DTensor) for p in params)
    optimizer_spans = tuple(slice(spans[0].start, spans[-1].stop) for spans in group_spans)
    return ParamLayout(tuple(_unique_names(names)), tuple(params), tuple(group_spans), optimizer_spans, sharded)


def _unique_names(names: Sequence[str]) -> Iterator[str]:
    """Number repeated names: a parameter in two optimizers is measured once for each."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}@{seen[name]}"


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, with final values: a partial DTensor is reduced first."""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(isinstance(p, Partial) for p in tensor.placements):
        placements = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def owns_elements(tensor: Tensor) -> bool:
    """Whether this rank's part of a DTensor is the one that counts, so that each element is counted once."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(at == 0 or p.is_shard() for at, p in zip(coordinate, tensor.placements, strict=True))


def local_grads(params: Sequence[Tensor]) -> list[Tensor | None]:
    """This rank's parts of the gradients as they are now; None where a parameter has none."""
    grads: list[Tensor | None] = list(map(_GRAD, params))
    if _PLAIN.issuperset(map(type, grads)):  # the common case, and a cheap check
        return grads
    return [g if g is None or type(g) is Tensor else to_local(g.detach()) for g in grads]


def main_device(params: Sequence[Tensor]) -> torch.device:
    """The device the numbers of a run live on: the first accelerator that holds a parameter, else the CPU."""
    devices = [to_local(p).device for p in params]
    return next((d for d in devices if d.type != "cpu"), devices[0])

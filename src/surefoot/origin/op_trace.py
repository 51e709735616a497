"""Follows non-finite values through the operations of a forward and backward pass to the one that made them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from surefoot.checkpoint.tree import tensors_in
from surefoot.measure.layout import to_local
from surefoot.origin.call_site import CallSite, CallSites
from surefoot.origin_record import TensorRange

UNINITIALISED = ("empty", "new_empty", "resize")
"""Operations whose results hold whatever was in memory."""
ROW_WISE = ("softmax", "logsumexp", "scaled_dot_product", "logcumsumexp", "max_pool", "amax", "cummax")
"""Operations for which -inf stands for something that does not count."""
LOGS = ("log", "log2", "log10", "log1p", "logit", "xlogy")
MAX_RANGES = 64
"""Operations of which the ranges of inputs and outputs are kept."""


@dataclass(slots=True)
class TracedOp:
    """One operation with a non-finite output, or a tensor that was non-finite before the first."""

    index: int
    name: str
    site: CallSite | None
    backward: bool = False
    node: int = -1
    """The autograd node it belongs to, counted from the first of the pass: the one it made, or in backward the one
    that runs."""
    has_nan: bool = False
    has_posinf: bool = False
    constant: bool = False
    """The code itself gave it an infinite value, as a mask does."""
    tensor: str = ""
    """What this tensor is, where it is no operation."""
    source_kind: str = ""
    """batch, weights or buffer; empty for an operation, and for a tensor from elsewhere."""
    sources: list[TracedOp] = field(default_factory=list)
    """What made its non-finite inputs."""
    inputs: tuple[TensorRange, ...] = ()
    outputs: tuple[TensorRange, ...] = ()
    args: str = ""
    """Its numbers, such as an exponent."""
    bad_rows: frozenset[int] = frozenset()
    """Indices in the first dimension of its output that hold non-finite values."""

    @property
    def deliberate(self) -> bool:
        """Infinite because the code says so: a mask, or what came of one."""
        if self.has_nan or self.source_kind:
            return False
        if not self.name:
            return True
        return self.constant or (bool(self.sources) and all(source.deliberate for source in self.sources))


class OpTrace(TorchDispatchMode):
    """Records where each operation was called, and those whose results are not finite."""

    def __init__(self, sites: CallSites, *, wanted_node: int = -1) -> None:
        super().__init__()
        self._sites = sites
        self._first_node = _next_node()
        self._wanted_node = wanted_node
        """The autograd node whose forward operation is to be kept in `wanted`."""
        self.wanted: TracedOp | None = None
        self.in_backward = False
        self.sites_by_node: dict[int, tuple[str, CallSite]] = {}
        """The forward operation that made each autograd node."""
        self._writers: dict[int, TracedOp] = {}
        """What wrote non-finite values into a storage, by its address."""
        self._count = 0
        self._ranges_kept = 0

    def add_source(self, tensor: Tensor, name: str, kind: str) -> None:
        """Note a tensor that is non-finite from the start."""
        local = to_local(tensor.detach())
        if not is_finite(local):
            nan, posinf = bool(local.isnan().any()), bool(local.isposinf().any())
            source = TracedOp(-1, name, None, has_nan=nan, has_posinf=posinf, tensor=name, source_kind=kind)
            source.outputs, source.bad_rows = (tensor_range(local),), bad_rows(local)
            self._writers[address(local)] = source

    def writer_of(self, tensor: Tensor) -> TracedOp | None:
        """What made this tensor non-finite."""
        return self._writers.get(address(to_local(tensor.detach())))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [*floats_in((args, kwargs))]
        sources = self._sources(inputs)
        before = tensor_range(to_local(inputs[0].detach())) if func._schema.is_mutable and inputs else None
        out = func(*args, **kwargs)
        self._count += 1
        if "scaled_dot_product" in func.__name__ and isinstance(out, tuple) and not self.in_backward:
            self._check(func, inputs, [*floats_in(out[0])], sources, before, (args, kwargs))
        else:
            self._check(func, inputs, [*floats_in(out)], sources, before, (args, kwargs))
        return out

    def _sources(self, inputs: Iterable[Tensor]) -> list[TracedOp]:
        found = (self._writers.get(address(to_local(t.detach()))) for t in inputs)
        return list({id(source): source for source in found if source is not None}.values())

    def _check(
        self,
        func: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
        sources: list[TracedOp],
        before: TensorRange | None,
        arguments: Any,
    ) -> None:
        name = func._overloadpacket.__name__
        site = self._sites.here()
        node = _next_node() - 1 - self._first_node
        if site is not None:  # in backward, too, where activation checkpointing runs the forward pass again
            self.sites_by_node.setdefault(node, (name, site))
        if self.in_backward:
            running = torch._C._current_autograd_node()
            node = -1 if running is None else running._sequence_nr() - self._first_node
        elif site is not None and node == self._wanted_node and self.wanted is None:
            self.wanted = self._op(name, site, node, inputs, outputs, before, arguments)
        if func.is_view:
            return
        for output in outputs:
            local = to_local(output.detach())
            if name.startswith(UNINITIALISED) or is_finite(local):
                if not func._schema.is_mutable or local.numel() == local.untyped_storage().nbytes() // local.itemsize:
                    self._writers.pop(address(local), None)
                continue
            op = TracedOp(self._count, name, site, backward=self.in_backward, node=node, sources=sources)
            self._describe(op, local, inputs, outputs, before, arguments)
            self._writers[address(local)] = op

    def _op(
        self, name: str, site: CallSite, node: int, inputs: list[Tensor], outputs: list[Tensor], before: Any, args: Any
    ) -> TracedOp:
        op = TracedOp(self._count, name, site, node=node)
        op.inputs = _input_ranges(inputs, outputs, before)
        op.outputs = tuple(tensor_range(to_local(t.detach())) for t in outputs[:1])
        op.args = _numbers(args)
        return op

    def _describe(
        self, op: TracedOp, local: Tensor, inputs: list[Tensor], outputs: list[Tensor], before: Any, arguments: Any
    ) -> None:
        op.has_nan, op.has_posinf = bool(local.isnan().any()), bool(local.isposinf().any())
        op.constant = not op.has_nan and has_nonfinite_number(arguments)
        known = [source for source in op.sources if not source.deliberate]
        if not op.sources and not op.constant:
            self._add_outside_sources(op, inputs, outputs)
        if not known or op.name in LOGS or self._ranges_kept < MAX_RANGES:
            self._ranges_kept += 1
            op.inputs = _input_ranges(inputs, outputs, before)
            op.outputs = (tensor_range(local),)
            op.args = _numbers(arguments)
            op.bad_rows = bad_rows(local)

    def _add_outside_sources(self, op: TracedOp, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Inputs that no recorded operation made, such as a mask that was built before."""
        written = {address(to_local(t.detach())) for t in outputs}
        for tensor in inputs:
            local = to_local(tensor.detach())
            if address(local) not in written and not is_finite(local):
                nan, posinf = bool(local.isnan().any()), bool(local.isposinf().any())
                if local.dim() == 0 and not nan:  # a number that the code has written
                    op.constant = not op.has_nan
                    continue
                op.sources.append(TracedOp(-1, "", op.site, has_nan=nan, has_posinf=posinf, tensor="a tensor"))


def producers(op: TracedOp) -> list[TracedOp]:
    """What made the non-finite value of this operation: the ends of all ways back, first in time first."""
    ends: dict[int, TracedOp] = {}
    seen: set[int] = set()
    waiting = [op]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        further = [source for source in current.sources if _passes(source, current)]
        if not further:
            ends[id(current)] = current
        waiting += further
    return sorted(ends.values(), key=lambda end: end.index)


def _passes(source: TracedOp, op: TracedOp) -> bool:
    """The operation only passes on what this source made: infinite values that the code has set, as in a mask, only
    where they have reached the loss as they are."""
    if source.deliberate:
        return op.deliberate
    only_minus_inf = not source.has_nan and not source.has_posinf
    row_wise = any(word in op.name for word in ROW_WISE)
    return not (row_wise and only_minus_inf and (source.name in LOGS or bool(source.source_kind)))


def _next_node() -> int:
    """The sequence number that the next autograd node of this thread will have."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def _input_ranges(inputs: list[Tensor], outputs: list[Tensor], before: TensorRange | None) -> tuple[TensorRange, ...]:
    written = {address(to_local(t.detach())) for t in outputs}
    ranges = [
        before if before is not None and k == 0 else tensor_range(to_local(t.detach()))
        for k, t in enumerate(inputs[:4])
        if before is None or k == 0 or address(to_local(t.detach())) not in written
    ]
    return tuple(ranges)


# -- values


@contextmanager
def no_probes() -> Iterator[None]:
    """What is done inside is not traced."""
    with torch.no_grad(), _disable_current_modes():
        yield


def floats_in(value: Any) -> Iterator[Tensor]:
    """All dense floating-point tensors among them."""
    for tensor in tensors_in(value):
        if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.device.type != "meta":
            yield tensor


def is_finite(tensor: Tensor) -> bool:
    """One pass over the values; a second where their sum alone overflows."""
    if tensor.numel() == 0:
        return True
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensor_range(tensor: Tensor) -> TensorRange:
    """Shape, dtype and values of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    finite = tensor[torch.isfinite(tensor)]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (math.nan, math.nan)
    nans, infs = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return TensorRange(tuple(tensor.shape), dtype, low, high, nans, infs, int((tensor == 0).sum()))


def bad_rows(tensor: Tensor) -> frozenset[int]:
    """Indices in the first dimension with non-finite values."""
    if tensor.dim() == 0:
        return frozenset()
    flags = ~torch.isfinite(tensor.flatten(1)).all(1) if tensor.dim() > 1 else ~torch.isfinite(tensor)
    return frozenset(flags.nonzero().flatten().tolist())


def has_nonfinite_number(value: Any) -> bool:
    """Whether a number among the arguments is infinite, or a tensor that is one."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Tensor):
        return False
    if isinstance(value, Mapping):
        return any(has_nonfinite_number(part) for part in value.values())
    return isinstance(value, list | tuple) and any(has_nonfinite_number(part) for part in value)


def _numbers(value: Any) -> str:
    args = value[0] if isinstance(value, tuple) else ()
    return ", ".join(str(part) for part in args if isinstance(part, int | float) and not isinstance(part, bool))

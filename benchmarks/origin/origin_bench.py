"""Plants operations that make non-finite values into the models of the zoo and counts what `surefoot.locate` names."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import surefoot
from benchmarks.origin.planted import REPORT, TUNING, PlantedOp
from benchmarks.zoo.families import FAMILIES, MicroBatch, ModelFamily, Split
from surefoot.origin_record import Origin, OriginKind

PLACES = {
    "decoder": ("blocks.1.norm1", "blocks.0.mlp"),
    "convolution": ("1", "5"),
    "recurrent": ("head",),
    "plain": ("2", "8"),
    "encoder": ("blocks.0.attention.out", "norm"),
    "residual": ("3.norm1", "4"),
    "memory": ("head",),
    "autoencoder": ("1", "7"),
    "vision_language": ("projector", "language.blocks.1.mlp"),
}
"""The modules behind which an operation is planted."""
Batch = tuple[MicroBatch, Tensor]
"""A batch of the family, and 1 for each marked sample."""


class PlantedModule(nn.Module):
    """A module of the model with an operation behind it."""

    def __init__(self, inner: nn.Module, planted: PlantedOp) -> None:
        super().__init__()
        self.inner, self.planted = inner, planted
        self.mark = torch.zeros(1)

    def forward(self, *args: Any) -> Tensor:
        out = self.inner(*args)
        return self.planted.function(out, self.mark.to(out.dtype).reshape(-1, *[1] * (out.dim() - 1)))


@dataclass(frozen=True, slots=True)
class OriginCase:
    """One model with one planted fault, and what `locate` said about it."""

    family: str
    fault: str
    compiled: bool
    backward: bool
    module: bool
    operation: bool
    samples: bool
    blamed_healthy: bool
    forwards: int
    allowed: int
    seconds: float
    named: str

    @property
    def right(self) -> bool:
        return self.module and self.operation and self.samples


def main(split: str, *, only: str = "", say: Callable[[str], None] = lambda _: None) -> list[OriginCase]:
    """All cases of a split."""
    cases: list[OriginCase] = []
    families = [family for family in FAMILIES.values() if family.split is Split(split)]
    for k, family in enumerate(families):
        for case in _cases(family, k, Split(split)):
            if only in f"{case.family} {case.fault}":
                cases.append(case)
                if not case.right:
                    say(f"{case.family}, {case.fault}{', compiled' * case.compiled}: {case.named}")
    return cases


def _cases(family: ModelFamily, number: int, split: Split) -> Iterator[OriginCase]:
    operations = TUNING if split is Split.TUNING else REPORT
    for j, planted in enumerate(operations):
        fits = not planted.needs_features or "recurrent" not in family.traits
        if (number + j) % 2 == 0 and fits:
            place = PLACES[family.name][(j // 2) % len(PLACES[family.name])]
            yield _planted_case(family, planted, place, compiled=j % 4 < 2, seed=100 * number + j)
    yield _batch_case(family, seed=number)
    yield _weights_case(family, seed=number)


def _planted_case(family: ModelFamily, planted: PlantedOp, place: str, *, compiled: bool, seed: int) -> OriginCase:
    torch.manual_seed(seed)
    model = family.build()
    parent_name, _, name = place.rpartition(".")
    parent = model.get_submodule(parent_name)
    module = PlantedModule(model.get_submodule(place), planted)
    setattr(parent, name, module)
    batch, marked = _batch(family, seed)

    def step_fn(model: nn.Module, batch: Batch) -> Tensor:
        module.mark = batch[1]
        return family.loss(model, batch[0])

    origin = _locate(model, batch, step_fn, compiled=compiled)
    code = planted.function.__code__
    at_line = code.co_firstlineno <= origin.line <= code.co_firstlineno + 6 and origin.file == code.co_filename
    return _case(
        family,
        planted.name,
        origin,
        compiled=compiled,
        backward=planted.backward,
        module=origin.module == place,
        operation=origin.operation in planted.operations and at_line,
        marked=marked,
    )


def _batch_case(family: ModelFamily, *, seed: int) -> OriginCase:
    """NaN in the numbers of a sample; of tokens, in the marks, that are multiplied with the loss."""
    torch.manual_seed(seed)
    model = family.build()
    (micro, mark), marked = _batch(family, seed)
    if micro.x.is_floating_point():
        micro.x[marked] = math.nan
    else:
        mark[marked] = math.nan

    def step_fn(model: nn.Module, batch: Batch) -> Tensor:
        return family.loss(model, batch[0]) * (1 + batch[1].mean())

    origin = _locate(model, (micro, mark), step_fn, compiled=seed % 2 == 0)
    named = origin.kind is OriginKind.BATCH
    return _case(
        family,
        "NaN in the batch",
        origin,
        compiled=seed % 2 == 0,
        backward=False,
        module=named,
        operation=named and origin.tensor.startswith("tensor"),
        marked=marked,
    )


def _weights_case(family: ModelFamily, *, seed: int) -> OriginCase:
    """A damaged weight: no sample is to blame."""
    torch.manual_seed(seed)
    model = family.build()
    name, weight = [*model.named_parameters()][-2]
    with torch.no_grad():
        weight.view(-1)[3] = math.inf if seed % 2 else math.nan
    batch, _ = _batch(family, seed)
    origin = _locate(model, batch, lambda model, batch: family.loss(model, batch[0]), compiled=False)
    named = origin.kind is OriginKind.WEIGHTS
    return _case(
        family,
        "damaged weight",
        origin,
        compiled=False,
        backward=False,
        module=named,
        operation=named and origin.tensor == name,
        marked=[],
    )


def _batch(family: ModelFamily, seed: int) -> tuple[Batch, list[int]]:
    """A batch and the samples marked in it: one, in every fourth batch two."""
    rng = torch.Generator().manual_seed(seed)
    micro = family.sample(rng, family.samples)
    marked = sorted(torch.randperm(family.samples, generator=rng)[: 1 + (seed % 4 == 3)].tolist())
    mark = torch.zeros(family.samples)
    mark[marked] = 1.0
    return (micro, mark), marked


def _locate(model: nn.Module, batch: Batch, step_fn: Any, *, compiled: bool) -> Origin:
    return surefoot.locate(torch.compile(model, backend="eager") if compiled else model, batch, step_fn)  # pyright: ignore[reportArgumentType]


def _case(
    family: ModelFamily,
    fault: str,
    origin: Origin,
    *,
    compiled: bool,
    backward: bool,
    module: bool,
    operation: bool,
    marked: list[int],
) -> OriginCase:
    return OriginCase(
        family=family.name,
        fault=fault,
        compiled=compiled,
        backward=backward,
        module=module,
        operation=operation,
        samples=list(origin.samples) == marked,
        blamed_healthy=bool(set(origin.samples) - set(marked)),
        forwards=origin.forwards,
        allowed=2 + 2 * math.ceil(math.log2(family.samples)),
        seconds=origin.seconds,
        named=f"{origin.reason}; forwards {origin.forwards}",
    )


def report(cases: list[OriginCase]) -> str:
    """The table, as Markdown."""
    rows = [
        ("forward", [c for c in cases if not c.backward]),
        ("backward", [c for c in cases if c.backward]),
        ("eager", [c for c in cases if not c.compiled]),
        ("compiled", [c for c in cases if c.compiled]),
        ("all", cases),
    ]
    lines = [
        "| planted | cases | module | operation | samples | healthy sample blamed | forwards, most | seconds, most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, chosen in rows:
        if chosen:
            right = [sum(getattr(c, part) for c in chosen) for part in ("module", "operation", "samples")]
            blamed = sum(c.blamed_healthy for c in chosen)
            most = max(c.forwards for c in chosen)
            seconds = max(c.seconds for c in chosen)
            cells = [name, len(chosen), *right, blamed, most, f"{seconds:.2f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    if cases:
        over = sum(c.forwards > c.allowed for c in cases)
        median = statistics.median(c.seconds for c in cases)
        lines.append(f"\nmedian {median:.2f} s; {over} cases with more than 2 + 2 log2(batch) forward passes")
    return "\n".join(lines)

"""What the samples hold that were drawn: ranges, targets, lengths, copies; looked at on the host, before the device."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

IGNORED = -100
"""The target that does not count, as everywhere in torch."""
_TARGETS = ("targets", "labels", "label", "target", "y")
_SECONDS = 5.0
"""Time that looking may take in all: what is measured beside it should not suffer."""


@dataclass(slots=True)
class Column:
    """One tensor of the batches, over all that were looked at."""

    real: bool
    low: float = math.inf
    high: float = -math.inf
    nonfinite: int = 0
    """Samples with a value that is not finite."""

    def take(self, values: Tensor) -> None:
        if self.real:
            finite = torch.isfinite(values)
            self.nonfinite += int((~finite.reshape(len(values), -1).all(1)).sum()) if values.dim() else 0
            values = values[finite]
        else:
            values = values[values != IGNORED]
        if values.numel():
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))


@dataclass(slots=True)
class Seen:
    """Grows as batches pass by."""

    samples: int = 0
    batches: int = 0
    columns: dict[str, Column] = field(default_factory=dict)
    targets: str | None = None
    """Which column holds what is to be learnt."""
    lengths: list[int] = field(default_factory=list)
    """Targets that count, of each sample that is a sequence."""
    classes: Counter[int] = field(default_factory=Counter)
    """Of samples that have one label each."""
    contents: dict[int, int] = field(default_factory=dict)
    """From the hash of a sample's inputs to how often it was drawn."""
    wholes: dict[int, set[int]] = field(default_factory=dict)
    """From the same to the hashes of all that belongs to it."""
    spent: float = 0.0

    def passing(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Hand batches on, and look at them on the way for as long as there is time."""
        for batch in batches:
            if self.spent < _SECONDS:
                began = time.monotonic()
                self.take(batch)
                self.spent += time.monotonic() - began
            yield batch

    def take(self, batch: Any) -> None:
        found = dict(tensors_of(batch))
        size = len(next(iter(found.values()))) if found else 0
        found = {name: tensor for name, tensor in found.items() if len(tensor) == size}
        self.batches += 1
        self.samples += size
        self.targets = self.targets or _targets_of(found)
        for name, tensor in found.items():
            column = self.columns.setdefault(name, Column(tensor.is_floating_point()))
            column.take(tensor)
        self._count_targets(found.get(self.targets or ""))
        for place in range(size):
            self._remember([tensor[place] for tensor in found.values()])

    def _count_targets(self, targets: Tensor | None) -> None:
        if targets is None or targets.is_floating_point():
            return
        if targets.dim() == 1:
            self.classes.update(targets[targets != IGNORED].tolist())
        else:
            self.lengths += (targets != IGNORED).reshape(len(targets), -1).sum(1).tolist()

    def _remember(self, values: list[Tensor]) -> None:
        first = digest(values[0])
        self.contents[first] = self.contents.get(first, 0) + 1
        self.wholes.setdefault(first, set()).add(hash(tuple(digest(value) for value in values[1:])))


def tensors_of(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with their names, inputs first; numbers alone are no samples."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield name or "inputs", batch.detach().to("cpu")
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, list | tuple):
        for place, value in enumerate(batch):
            yield from tensors_of(value, f"{name}[{place}]" if name else f"[{place}]")


def digest(values: Tensor) -> int:
    """What a tensor holds, as one number."""
    return xxhash.xxh3_64_intdigest(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _targets_of(found: Mapping[str, Tensor]) -> str | None:
    """The column with the targets: by its name, else the last one after the inputs that holds whole numbers."""
    for name in found:
        if name.rpartition(".")[2].lower() in _TARGETS:
            return name
    whole = [name for name, tensor in list(found.items())[1:] if not tensor.is_floating_point()]
    return whole[-1] if whole else None

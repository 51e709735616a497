"""Statistics of the samples a trial draws: ranges, targets, lengths, duplicates; computed on the host."""

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

IGNORE_INDEX = -100
"""The target that does not count, as everywhere in torch."""
_TARGET_NAMES = ("targets", "labels", "label", "target", "y")
_MAX_SECONDS = 5.0
"""Total time spent on statistics, so that the measured speed does not suffer."""


@dataclass(slots=True)
class ColumnStats:
    """One tensor of the batches, over all batches seen."""

    is_float: bool
    low: float = math.inf
    high: float = -math.inf
    nonfinite: int = 0
    """Samples with a value that is not finite."""

    def add(self, values: Tensor) -> None:
        if self.is_float:
            finite = torch.isfinite(values)
            self.nonfinite += int((~finite.reshape(len(values), -1).all(1)).sum()) if values.dim() else 0
            values = values[finite]
        else:
            values = values[values != IGNORE_INDEX]
        if values.numel():
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))


@dataclass(slots=True)
class DataStats:
    """Statistics over all batches seen."""

    samples: int = 0
    batches: int = 0
    columns: dict[str, ColumnStats] = field(default_factory=dict)
    target_column: str | None = None
    lengths: list[int] = field(default_factory=list)
    """Targets that count, of each sample that is a sequence."""
    labels: Counter[int] = field(default_factory=Counter)
    """Of samples with one label each."""
    input_counts: dict[int, int] = field(default_factory=dict)
    """How often each sample was drawn, by the hash of its inputs."""
    targets_by_input: dict[int, set[int]] = field(default_factory=dict)
    """Hashes of everything else in the sample, by the hash of its inputs."""
    seconds: float = 0.0

    def observe(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches unchanged, adding each to the statistics while there is time."""
        for batch in batches:
            if self.seconds < _MAX_SECONDS:
                start = time.monotonic()
                self.add(batch)
                self.seconds += time.monotonic() - start
            yield batch

    def add(self, batch: Any) -> None:
        tensors = dict(named_tensors(batch))
        size = len(next(iter(tensors.values()))) if tensors else 0
        tensors = {name: tensor for name, tensor in tensors.items() if len(tensor) == size}
        self.batches += 1
        self.samples += size
        self.target_column = self.target_column or _find_targets(tensors)
        for name, tensor in tensors.items():
            column = self.columns.setdefault(name, ColumnStats(tensor.is_floating_point()))
            column.add(tensor)
        self._add_targets(tensors.get(self.target_column or ""))
        for index in range(size):
            self._add_hashes([tensor[index] for tensor in tensors.values()])

    def _add_targets(self, targets: Tensor | None) -> None:
        if targets is None or targets.is_floating_point():
            return
        if targets.dim() == 1:
            self.labels.update(targets[targets != IGNORE_INDEX].tolist())
        else:
            self.lengths += (targets != IGNORE_INDEX).reshape(len(targets), -1).sum(1).tolist()

    def _add_hashes(self, sample: list[Tensor]) -> None:
        inputs = content_hash(sample[0])
        self.input_counts[inputs] = self.input_counts.get(inputs, 0) + 1
        self.targets_by_input.setdefault(inputs, set()).add(hash(tuple(content_hash(value) for value in sample[1:])))


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested batch with their names, inputs first; 0-dimensional ones are not samples."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield name or "inputs", batch.detach().to("cpu")
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from named_tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from named_tensors(value, f"{name}[{index}]" if name else f"[{index}]")


def content_hash(values: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _find_targets(tensors: Mapping[str, Tensor]) -> str | None:
    """The column with the targets: by its name, else the last integer column after the inputs."""
    for name in tensors:
        if name.rpartition(".")[2].lower() in _TARGET_NAMES:
            return name
    integers = [name for name, tensor in list(tensors.items())[1:] if not tensor.is_floating_point()]
    return integers[-1] if integers else None

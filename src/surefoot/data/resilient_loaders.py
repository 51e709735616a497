"""Training and eval loaders that replace unreadable samples: named, counted, and always by the same others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from surefoot.data.data_error import DataError, UnreadableSample, check_unreadable
from surefoot.data.epoch_order import EpochOrder, hash_key
from surefoot.data.language_dataset import EVAL_SEED
from surefoot.data.loaders import Loader
from surefoot.data.sample_sources import source_in
from surefoot.data.sampler import Sampler

_MAX_TRIES = 16
_REPLACEMENT_KEY = 0x494E53544541


class _NoSample:
    """Neither the sample nor any replacement could be read."""


@dataclass(frozen=True, slots=True)
class _ReadSample:
    sample: Any
    failed: tuple[UnreadableSample, ...] = ()
    """Samples that could not be read before this one was."""


class ReplaceUnreadable(Dataset[_ReadSample]):
    """A dataset that replaces an unreadable sample by another, chosen by its index alone.

    A resumed run, with other workers or ranks, therefore sees the same replacements.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _ReadSample:
        failed, candidate = [], index
        for attempt in range(_MAX_TRIES):
            try:
                return _ReadSample(self._read(candidate), tuple(failed))
            except MemoryError:
                raise
            except Exception as error:  # a user's dataset may raise anything
                reason = str(error).strip().split("\n")[0] or "no reason given"
                failed.append(UnreadableSample(self._name(candidate), f"{type(error).__name__}: {reason}"))
            candidate = hash_key(index, attempt, _REPLACEMENT_KEY) % len(self)
        return _ReadSample(_NoSample(), tuple(failed))

    def _read(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except OSError:  # disks and networks fail transiently: try once more before replacing the sample
            return self.dataset[index]

    def source_of(self, index: int) -> str:
        return source_in(self.dataset, index)

    def set_vocab(self, vocab: int) -> None:
        """Make samples with tokens from `vocab` on unreadable."""
        self.dataset.vocab = vocab

    def _name(self, index: int) -> str:
        """The index in the whole dataset, of which this may be a subset."""
        indices = getattr(self.dataset, "indices", None)
        return f"sample {index if indices is None else indices[index]}"

    def __getitems__(self, indices: list[int]) -> list[_ReadSample]:
        get_many = getattr(self.dataset, "__getitems__", None)
        if get_many is not None:
            try:
                return [_ReadSample(sample) for sample in get_many(indices)]
            except MemoryError:
                raise
            except Exception:  # one of them failed: the loop below finds which
                pass
        return [self[index] for index in indices]


@dataclass(slots=True)
class _ReportedBatch:
    """A batch from a worker, with the samples that failed there."""

    content: Any
    failed: list[UnreadableSample]

    def pin_memory(self, device: Any = None) -> _ReportedBatch:
        from torch.utils.data._utils.pin_memory import pin_memory

        return _ReportedBatch(pin_memory(self.content, device), self.failed)


class ReportingCollate:
    """Collates samples with `collate` and passes on which ones could not be read."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, reads: list[_ReadSample]) -> _ReportedBatch:
        failed = [sample for read in reads for sample in read.failed]
        if any(isinstance(read.sample, _NoSample) for read in reads):
            return _ReportedBatch(_NoSample(), failed)
        return _ReportedBatch(self._collate([read.sample for read in reads]), failed)


class UnreadableLog:
    """Unreadable samples, those found while opening and those found since in this process; raises above the limit."""

    def __init__(self, limit: int, while_opening: list[UnreadableSample]) -> None:
        self._limit, self._while_opening = limit, while_opening
        self._by_name: dict[str, UnreadableSample] = {}

    @property
    def samples(self) -> list[UnreadableSample]:
        return [*self._while_opening, *self._by_name.values()]

    def unwrap(self, batch: _ReportedBatch) -> Any:
        """Record the failed samples of a batch and return its content."""
        for sample in batch.failed:
            self._by_name.setdefault(sample.name, sample)
        if batch.failed:
            check_unreadable(self.samples, self._limit)
        if isinstance(batch.content, _NoSample):
            first = "".join(f"\n  {sample}" for sample in batch.failed[:5])
            raise DataError(
                f"no sample could be read in {_MAX_TRIES} tries at different indices:{first}\n"
                "Check the disk and the data, then start the run again: it resumes where it stopped."
            )
        return batch.content


class TrainLoader(Loader):
    """A `Loader` over `ReplaceUnreadable` that logs the samples that could not be read."""

    def __init__(
        self, dataset: ReplaceUnreadable, sampler: Sampler, unreadable_log: UnreadableLog, **options: Any
    ) -> None:
        super().__init__(dataset, sampler, **options)
        self.unreadable_log, self._replacing_dataset = unreadable_log, dataset

    def set_vocab(self, vocab: int) -> None:
        """Make samples with tokens from `vocab` on unreadable; call it before the first epoch."""
        self._replacing_dataset.set_vocab(vocab)

    def _next(self, loop: int) -> Any:
        return self.unreadable_log.unwrap(super()._next(loop))


class EvalLoader:
    """Eval batches of one rank, the same in every loop, shuffled so that the first few represent the whole.

    Every rank has the same number of samples and batches; the remainder (fewer samples than ranks) is not used. With
    fewer samples than ranks, ranks share samples so that none is without.
    """

    def __init__(
        self,
        dataset: ReplaceUnreadable,
        collate: ReportingCollate,
        unreadable_log: UnreadableLog,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._dataset, self._collate, self._unreadable_log = dataset, collate, unreadable_log
        self._batch_size = batch_size
        self._order = EpochOrder(len(dataset), seed=EVAL_SEED, epoch=1, shuffle=True)
        per_rank = len(dataset) // world_size
        first = rank * per_rank if per_rank else rank % len(dataset)
        self._places = range(first, first + max(1, per_rank))

    @property
    def samples(self) -> list[int]:
        """The sample indices of this rank."""
        return self._order.samples(np.array(self._places)).tolist()

    def set_vocab(self, vocab: int) -> None:
        """Make samples with tokens from `vocab` on unreadable."""
        self._dataset.set_vocab(vocab)

    def __len__(self) -> int:
        return (len(self._places) + self._batch_size - 1) // self._batch_size

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self._places), self._batch_size):
            indices = self._order.samples(np.array(self._places[first : first + self._batch_size])).tolist()
            yield self._unreadable_log.unwrap(self._collate(self._dataset.__getitems__(indices)))

"""Samples that cannot be read are passed over: named, counted, and replaced by the same others each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from surefoot.data.loaders import Loader
from surefoot.data.order import hash_key
from surefoot.data.problem import DataError, UnreadableSample, check_unreadable
from surefoot.data.sampler import Sampler

_TRIES = 16
_INSTEAD = 0x494E53544541


class _Nothing:
    """Neither a sample nor any of those that were tried in its place."""


@dataclass(frozen=True, slots=True)
class _Read:
    sample: Any
    failed: tuple[UnreadableSample, ...] = ()
    """What could not be read on the way to it."""


class ReplaceUnreadable(Dataset[_Read]):
    """A dataset that always has a sample: for one that cannot be read another comes, which its number decides.

    It depends on nothing else, so a run that is resumed, with other workers or ranks, sees the same.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _Read:
        failed, wanted = [], index
        for attempt in range(_TRIES):
            try:
                return _Read(self._read(wanted), tuple(failed))
            except MemoryError:
                raise
            except Exception as error:  # whatever a dataset of the user's own may raise
                reason = str(error).strip().split("\n")[0] or "no reason given"
                failed.append(UnreadableSample(self._name(wanted), f"{type(error).__name__}: {reason}"))
            wanted = hash_key(index, attempt, _INSTEAD) % len(self)
        return _Read(_Nothing(), tuple(failed))

    def _read(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except OSError:  # disks and networks have weak moments, which are no reason for another sample
            return self.dataset[index]

    def set_vocab(self, vocab: int) -> None:
        self.dataset.vocab = vocab

    def _name(self, index: int) -> str:
        """As the user counts: in the whole of which this may be a part."""
        whole = getattr(self.dataset, "indices", None)
        return f"sample {index if whole is None else whole[index]}"

    def __getitems__(self, indices: list[int]) -> list[_Read]:
        many = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            try:
                return [_Read(sample) for sample in many(indices)]
            except MemoryError:
                raise
            except Exception:  # one of them, which is found below
                pass
        return [self[index] for index in indices]


@dataclass(slots=True)
class _Batch:
    """On its way from a worker, with what went wrong there."""

    content: Any
    failed: list[UnreadableSample]

    def pin_memory(self, device: Any = None) -> _Batch:
        from torch.utils.data._utils.pin_memory import pin_memory

        return _Batch(pin_memory(self.content, device), self.failed)


class ReportingCollate:
    """Makes batches with `collate`, and hands on what could not be read."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, reads: list[_Read]) -> _Batch:
        failed = [one for read in reads for one in read.failed]
        if any(isinstance(read.sample, _Nothing) for read in reads):
            return _Batch(_Nothing(), failed)
        return _Batch(self._collate([read.sample for read in reads]), failed)


class UnreadableLog:
    """What could not be read so far, at the opening and since then in this process, and how much of that is borne."""

    def __init__(self, most: int, opening: list[UnreadableSample]) -> None:
        self._most, self._opening = most, opening
        self._found: dict[str, UnreadableSample] = {}

    @property
    def samples(self) -> list[UnreadableSample]:
        return [*self._opening, *self._found.values()]

    def unwrap(self, batch: _Batch) -> Any:
        for one in batch.failed:
            self._found.setdefault(one.name, one)
        if batch.failed:
            check_unreadable(self.samples, self._most)
        if isinstance(batch.content, _Nothing):
            first = "".join(f"\n  {one}" for one in batch.failed[:5])
            raise DataError(
                f"no sample could be read, not in {_TRIES} tries in different places:{first}\n"
                "Check the disk and the data, then start the run again: it goes on where it was."
            )
        return batch.content


class TrainLoader(Loader):
    """A `Loader` that hands out batches and keeps a record of what could not be read."""

    def __init__(
        self, dataset: ReplaceUnreadable, sampler: Sampler, unreadable_log: UnreadableLog, **options: Any
    ) -> None:
        super().__init__(dataset, sampler, **options)
        self.record, self._sound = unreadable_log, dataset

    def set_vocab(self, vocab: int) -> None:
        """Tokens from here on make a sample unreadable; to be called before the first loop."""
        self._sound.set_vocab(vocab)

    def _next(self, loop: int) -> Any:
        return self.record.unwrap(super()._next(loop))

"""`make_loader`: torchdata's StatefulDataLoader around our sampler, which can stop and resume after any batch."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from surefoot.data.augmentation_rng import AugmentedDataset, WorkerSeededDataset
from surefoot.data.epoch_order import KIND, hash_key
from surefoot.data.sample_sources import source_in
from surefoot.data.sampler import BATCH, Sampler

RECENT_BATCHES = 256
"""Batches whose samples are remembered: an update is judged two steps later, and may be made of many batches."""


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    seed: int,
    shuffle: bool = True,
    drop_last: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    augment: Callable[[Any, torch.Generator], Any] | None = None,
    pin_memory: bool = False,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    timeout: float = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
) -> Loader:
    """A `StatefulDataLoader` that resumes exactly where it stopped, also in the middle of an epoch.

    `batch_size` is per rank. `rank` and `world_size` default to those of the process group; where several ranks must
    see the same samples (tensor or pipeline parallel), pass the data-parallel rank. The saved position is the same for
    all ranks, so a run can resume with another number of ranks or workers and another batch size.

    The random state of a dataset in worker processes is not saved. Make random numbers depend on the sample instead:
    `augment(sample, generator)` is called in the worker with a generator keyed by (seed, epoch, index), and gives the
    same result however often the run was stopped. To draw in your own dataset see `keyed_generator`.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"make_loader needs a dataset with __len__ and __getitem__, got {type(dataset).__name__}. For an iterable "
            "dataset use torchdata.stateful_dataloader.StatefulDataLoader, and implement state_dict and "
            "load_state_dict on the dataset."
        )
    distributed = dist.is_available() and dist.is_initialized()
    sampler = Sampler(
        dataset,  # pyright: ignore[reportArgumentType]
        batch_size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        rank=rank if rank is not None else dist.get_rank() if distributed else 0,
        world_size=world_size if world_size is not None else dist.get_world_size() if distributed else 1,
        with_epoch=augment is not None or num_workers > 0,
    )
    wrapped: Dataset[Any] = dataset
    if augment is not None:
        wrapped = AugmentedDataset(dataset, augment, seed)
    elif num_workers > 0:
        wrapped = WorkerSeededDataset(dataset, seed)
    return Loader(
        wrapped,
        sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        prefetch_factor=prefetch_factor,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
    )


class Loader(StatefulDataLoader[Any]):
    """Batches of a `Sampler`; `state_dict` is the position after the last batch the loop received.

    A loop continues from the position: if one is left in the middle of an epoch, the next one continues there. After
    the last batch the position stays in the old epoch until the loop has ended, so a run saved there first ends its
    epoch, without another batch. `load_state_dict`, `set_epoch` and `ban` take effect at the next batch, also within a
    running loop; prefetched batches are discarded.

    A data set with a method `source_of(index)` names its samples, as file and line or by row: guards use it.
    """

    def __init__(self, dataset: Dataset[Any], sampler: Sampler, **options: Any) -> None:
        # A separate generator: the workers' seeds would otherwise be drawn from torch's global one, and a resumed run
        # draws once more than one that was never stopped.
        self._worker_generator = torch.Generator()
        with warnings.catch_warnings():  # torchdata 0.11 calls a function that torch 2.13 deprecates
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            super().__init__(
                dataset,
                batch_sampler=sampler,
                generator=self._worker_generator,
                snapshot_every_n_steps=1,
                in_order=True,
                **options,
            )
        self._batches = sampler
        self._samples = dataset
        self._iter: Any = None
        """Torchdata's iterator; None when it must be restarted from the sampler's position."""
        self._loops = 0
        self._last_batch: list[Any] = []
        self._issued: deque[list[Any]] = deque()
        sampler.issued = self._issued
        self._recent: deque[tuple[int, list[Any]]] = deque(maxlen=RECENT_BATCHES)
        """The last batches with their numbers, by their samples."""
        self.num_fetched = 0
        """Batches that the loop has received so far."""
        self.seeds_workers = isinstance(dataset, AugmentedDataset | WorkerSeededDataset)
        """Whether random numbers drawn in worker processes depend on the batch only, so that a resume repeats them."""
        self.bans_changed: Callable[[], None] | None = None
        """Called after each `ban` and `lift`: the guard writes down what is banned."""
        self.through: Callable[[Callable[[], Any]], Any] | None = None
        """Called with a function that fetches a batch: the guard captures the random state before each fetch."""

    @property
    def epoch(self) -> int:
        return self.state_dict()["epoch"]

    @property
    def last_samples(self) -> list[int]:
        """The sample indices of the last batch, on this rank."""
        batch = self._last_batch if self._iter is None else self._saved_state(BATCH)["samples"] or self._last_batch
        return _without_epochs(batch)

    def samples_of(self, number: int) -> list[int]:
        """The sample indices of the batch after which `num_fetched` was this number, on this rank; empty for batches
        too long ago."""
        return next((_without_epochs(batch) for count, batch in reversed(self._recent) if count == number), [])

    def __iter__(self) -> Any:
        self._move_to(self.state_dict())
        self._iter = self._start()
        self._loops += 1
        return _LoaderIterator(self, self._loops)

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict() if self._iter is None else self._saved_state(KIND)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position; raises `WrongPosition`, a ValueError, if it is damaged or of other data."""
        self._move_to(state_dict)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of this epoch; does nothing within that epoch, so a resumed loop may call it as usual."""
        if epoch != self.epoch:
            self._batches.set_epoch(epoch)
            self._move_to(self._batches.state_dict())

    def ban(self, samples: int | Iterable[int]) -> None:
        """Never yield these samples again; call it with the same ones on all ranks."""
        state = self.state_dict()
        self._batches.ban(samples)
        self._bans_changed(state)

    def lift(self, samples: int | Iterable[int]) -> None:
        """Yield these banned samples again; call it with the same ones on all ranks."""
        state = self.state_dict()
        self._batches.lift(samples)
        self._bans_changed(state)

    def _bans_changed(self, state: dict[str, Any]) -> None:
        self._move_to({**state, "banned": self._batches.state_dict()["banned"]})
        if self.bans_changed is not None:
            self.bans_changed()

    @property
    def banned(self) -> tuple[int, ...]:
        """The banned samples, sorted."""
        return self._batches.position.banned

    @property
    def num_samples(self) -> int:
        """Samples of the data set, banned ones included."""
        return self._batches.position.length

    def source_of(self, sample: int) -> str:
        """File and line of a sample, or its row, as far as the data set knows; else empty."""
        return source_in(self._samples, sample)

    def _move_to(self, state: dict[str, Any]) -> None:
        """Move the sampler to this position and discard prefetched batches."""
        self._batches.load_state_dict(state)
        self._discard()

    def _discard(self) -> None:
        self._last_batch, self._iter = self.last_samples, None
        self._issued.clear()
        if not self.persistent_workers:
            self._iterator = None

    def _start(self) -> Any:
        position = self._batches.position
        self._worker_generator.manual_seed(hash_key(position.seed, position.epoch, self._batches.rank))
        return super().__iter__()

    def _next(self, loop: int) -> Any:
        if loop != self._loops:
            raise RuntimeError("this loop over the loader ended when another one began: it has no more batches")
        if self._iter is None:
            self._iter = self._start()
        return self._fetch() if self.through is None else self.through(self._fetch)

    def _fetch(self) -> Any:
        before = self._batches.position
        try:
            batch = next(self._iter)
        except StopIteration:
            self._discard()  # the sampler is at the start of the next epoch
            raise
        except BaseException:  # an unreadable sample, an interrupt: this batch was not yielded
            self._move_to(self.state_dict() if self.num_workers else before.state_dict())
            raise
        self.num_fetched += 1
        if self._issued:
            self._recent.append((self.num_fetched, self._issued.popleft()))
        return batch

    def _saved_state(self, kind: str) -> dict[str, Any]:
        """The state that our sampler or its iterator gave torchdata with the last batch."""
        return next(_find_kind(self._iter.state_dict(), kind))


def _without_epochs(batch: list[Any]) -> list[int]:
    return [item[1] if isinstance(item, tuple) else item for item in batch]


def _find_kind(state: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Our states within torchdata's, whatever keys it stores them under."""
    if isinstance(state, dict):
        if state.get("kind") == kind:
            yield state
        for value in state.values():
            yield from _find_kind(value, kind)


class _LoaderIterator(Iterator[Any]):
    """One loop over a loader; it follows when the loader is moved to another position meanwhile."""

    def __init__(self, loader: Loader, number: int) -> None:
        self._loader, self._number = loader, number
        self._ended = False

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            return self._loader._next(self._number)
        except StopIteration:
            self._ended = True
            raise

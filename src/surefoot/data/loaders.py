"""A loader that can stop after any batch and go on from there: torchdata's, around our sampler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from surefoot.data.chance import AugmentedDataset, WorkerSeededDataset
from surefoot.data.order import hash_key
from surefoot.data.position import KIND
from surefoot.data.sampler import BATCH, Sampler


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
    """A `StatefulDataLoader` that goes on exactly where it was, in the middle of an epoch too.

    `batch_size` is that of one rank. `rank` and `world_size` are those of the process group if there is one; where
    several ranks must see the same samples (tensor or pipeline parallel), pass the rank among the data-parallel ones.
    The saved position is the same for all ranks, so it fits any number of ranks, workers and any batch size later.

    Random numbers inside the dataset are not saved when it runs in workers. Let them depend on the sample instead:
    `augment(sample, generator)` is called with a generator keyed by (seed, epoch, index), in the worker, and gives the
    same result however often the run was stopped. For a dataset of your own making see `keyed_generator`.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"make_loader needs a dataset with a length and samples by number; {type(dataset).__name__} is none. For a "
            "stream use torchdata.stateful_dataloader.StatefulDataLoader, and give the stream state_dict and "
            "load_state_dict."
        )
    grouped = dist.is_available() and dist.is_initialized()
    sampler = Sampler(
        dataset,  # pyright: ignore[reportArgumentType]
        batch_size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        rank=rank if rank is not None else dist.get_rank() if grouped else 0,
        world_size=world_size if world_size is not None else dist.get_world_size() if grouped else 1,
        with_epoch=augment is not None or num_workers > 0,
    )
    asked: Dataset[Any] = dataset
    if augment is not None:
        asked = AugmentedDataset(dataset, augment, seed)
    elif num_workers > 0:
        asked = WorkerSeededDataset(dataset, seed)
    return Loader(
        asked,
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
    """Batches of a `Sampler`; `state_dict` tells the position after the batch that was handed out last.

    A loop goes on from the position: one that was left in the middle of an epoch is taken up there by the next. After
    the last batch the position is still in the old epoch until the loop has ended, so a run saved there first ends its
    epoch, with no further batch. `load_state_dict`, `set_epoch` and `ban` take effect at the next batch, also in a loop
    that is under way; what workers had read ahead is dropped.
    """

    def __init__(self, dataset: Dataset[Any], sampler: Sampler, **options: Any) -> None:
        # A generator of its own: workers' seeds would otherwise be drawn from torch's, and a resumed run draws once
        # more than one that was never stopped.
        self._chance = torch.Generator()
        with warnings.catch_warnings():  # torchdata 0.11 still calls what torch 2.13 would rather not hear of
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            super().__init__(
                dataset,
                batch_sampler=sampler,
                generator=self._chance,
                snapshot_every_n_steps=1,
                in_order=True,
                **options,
            )
        self._order = sampler
        self._live: Any = None
        """Torchdata's iterator; None when it has to be started anew, from where the sampler stands."""
        self._loops = 0
        self._last: list[Any] = []
        self.seeds_workers = isinstance(dataset, AugmentedDataset | WorkerSeededDataset)
        """Random numbers that the dataset draws in worker processes go by the batch, so they come again in a resume."""
        self.through: Callable[[Callable[[], Any]], Any] | None = None
        """Called with a function that fetches a batch: lets a guard know of the moment before each fetch."""

    @property
    def epoch(self) -> int:
        return self.state_dict()["epoch"]

    @property
    def last_samples(self) -> list[int]:
        """The numbers of the samples in the batch that was handed out last, on this rank."""
        batch = self._last if self._live is None else self._told(BATCH)["samples"] or self._last
        return [one[1] if isinstance(one, tuple) else one for one in batch]

    def __iter__(self) -> Any:
        self._go(self.state_dict())
        self._live = self._start()
        self._loops += 1
        return _Loop(self, self._loops)

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict() if self._live is None else self._told(KIND)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; raises `WrongPosition`, a ValueError, when the state is damaged or of other data."""
        self._go(state_dict)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of this epoch; within it already, stay: a resumed loop may call this as usual."""
        if epoch != self.epoch:
            self._order.set_epoch(epoch)
            self._go(self._order.state_dict())

    def ban(self, samples: int | Iterable[int]) -> None:
        """Never hand these samples out again; call it with the same ones on all ranks."""
        here = self.state_dict()
        self._order.ban(samples)
        self._go({**here, "banned": self._order.state_dict()["banned"]})

    def _go(self, state: dict[str, Any]) -> None:
        """Let the sampler stand there, and drop what was read ahead."""
        self._order.load_state_dict(state)
        self._drop()

    def _drop(self) -> None:
        self._last, self._live = self.last_samples, None
        if not self.persistent_workers:
            self._iterator = None

    def _start(self) -> Any:
        here = self._order.position
        self._chance.manual_seed(hash_key(here.seed, here.epoch, self._order.rank))
        return super().__iter__()

    def _next(self, loop: int) -> Any:
        if loop != self._loops:
            raise RuntimeError("this loop over the loader was left when another one began: it has no batches any more")
        if self._live is None:
            self._live = self._start()
        return self._fetch() if self.through is None else self.through(self._fetch)

    def _fetch(self) -> Any:
        before = self._order.position
        try:
            return next(self._live)
        except StopIteration:
            self._drop()  # the sampler stands at the beginning of the next epoch
            raise
        except BaseException:  # a sample that cannot be read, an interrupt: this batch was not handed out
            self._go(self.state_dict() if self.num_workers else before.state_dict())
            raise

    def _told(self, kind: str) -> dict[str, Any]:
        """What our sampler or its iterator told torchdata when it made the batch that was handed out last."""
        return next(_of_kind(self._live.state_dict(), kind))


def _of_kind(state: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Ours among torchdata's, whatever it calls the places in which it keeps them."""
    if isinstance(state, dict):
        if state.get("kind") == kind:
            yield state
        for value in state.values():
            yield from _of_kind(value, kind)


class _Loop(Iterator[Any]):
    """One loop over a loader, which goes on in the same place when the loader is sent elsewhere meanwhile."""

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

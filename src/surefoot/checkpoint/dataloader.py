"""What can be saved of a user's loader, and in words what cannot: known by its shape, whatever made it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from surefoot.checkpoint.tree import Stateful

_SEED = "torch's random numbers (each loop over the loader draws one, and a resumed run begins one more)"
_WORKERS = "random numbers that the data set draws in worker processes, if it draws any"
_IN_EPOCH = "the place in the epoch (it begins again with its first batch)"


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """How far a loader can be put back where it was."""

    keeper: Stateful | None
    """Saved and loaded with the run; None when there is nothing to save."""
    inexact: tuple[str, ...] = ()
    """What will not be the same after a resume, in words."""
    way_out: str = ""
    mended: tuple[str, ...] = ()
    """What of this is the same after all in a loop over `guard.batches(loader)`."""

    @property
    def warning(self) -> str | None:
        """One text for people, None when all is exact."""
        return self._warning(self.inexact, self.way_out)

    def warning_for(self, *, announced: bool) -> str | None:
        """The warning for a guarded loop: over `guard.batches(loader)` or the like, or what is lost only without it."""
        if announced:
            return self._warning(tuple(what for what in self.inexact if what not in self.mended), self.way_out)
        return self._warning(self.mended, "Write `for batch in guard.batches(loader):`.")

    def _warning(self, lost: tuple[str, ...], way_out: str) -> str | None:
        if not lost:
            return None
        return f"after a resume the data will not go on exactly. Not kept: {'; '.join(lost)}. {way_out}"


class SameRandomNumbers:
    """A loader whose state can be read and set without a draw from torch's global generator.

    Where it has no iterator yet, torchdata's makes one to be asked, and that draws a seed.
    """

    def __init__(self, loader: Stateful) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        before = torch.get_rng_state()
        try:
            return self._loader.state_dict()
        finally:
            torch.set_rng_state(before)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = torch.get_rng_state()
        try:
            self._loader.load_state_dict(state_dict)
        finally:
            torch.set_rng_state(before)


def position_of(loader: object) -> LoaderPosition:
    """What a resume can make of this loader; anything with `state_dict` and `load_state_dict` is taken at its word.

    For torch's and torchdata's loaders the ways in which they are known to go on with other samples are named.
    """
    if isinstance(loader, type) or not (isinstance(loader, Stateful) or _iterable(loader)):
        raise TypeError(f"a loader gives batches in a for loop or has a state_dict; {loader!r:.100} does neither")
    if isinstance(loader, Stateful):
        return _stateful(loader) if isinstance(loader, DataLoader) else LoaderPosition(loader)
    if isinstance(loader, DataLoader):
        return _stream(loader) if isinstance(loader.dataset, IterableDataset) else _plain(loader)
    if hasattr(loader, "__next__"):
        lost = f"the place in the data (a {type(loader).__name__} runs forward once and cannot tell how far it is)"
        return LoaderPosition(None, (lost,), f"Give it state_dict and load_state_dict, or use {_make()}.")
    out = f"Use {_make()}, or pass over what was seen: surefoot.data.skip_ahead(loader, n)."
    return LoaderPosition(None, (_IN_EPOCH,), out)


def _stateful(loader: Any) -> LoaderPosition:
    """StatefulDataLoader and its like, which keep the place but not every order."""
    sampler, lost = _sampler(loader), []
    if isinstance(sampler, RandomSampler):
        lost.append("the order of the epochs (torch's RandomSampler saves nothing of its generator)")
    elif not loader.num_workers and loader.generator is not None and _shared(loader.generator, sampler):
        lost.append("the order of the epochs (loader and sampler draw from the same generator)")
    if loader.generator is None:
        lost.append(_SEED)
    if not getattr(loader, "in_order", True):
        lost.append("the order of the batches (in_order=False)")
    if loader.num_workers and not getattr(loader, "seeds_workers", False):
        lost.append(_WORKERS)
    if not lost:
        return LoaderPosition(loader)
    if lost == [_WORKERS]:
        return LoaderPosition(loader, (_WORKERS,), f"Use {_make(loader)}.")
    mended = (_SEED,) if _SEED in lost else ()
    if isinstance(loader.dataset, IterableDataset):
        return LoaderPosition(loader, tuple(lost), "Pass generator=torch.Generator() to the loader.", mended)
    # With shuffle=True a generator on the loader would be the sampler's as well.
    first = "sampler=torchdata.stateful_dataloader.sampler.RandomSampler(dataset, generator=g) and "
    own = first if hasattr(sampler, "generator") else ""
    return LoaderPosition(
        loader, tuple(lost), f"Use {_make(loader)}, or pass {own}generator=torch.Generator() to the loader.", mended
    )


def _plain(loader: Any) -> LoaderPosition:
    sampler, lost = _sampler(loader), [_IN_EPOCH]
    if isinstance(sampler, RandomSampler):
        whose = "torch's own" if sampler.generator is None else "a"
        lost.append(f"the order (shuffled by {whose} generator, which has moved on: samples come twice or never)")
    elif isinstance(sampler, DistributedSampler):
        lost.append("the epoch of its DistributedSampler (unless the loop calls set_epoch)")
    elif not isinstance(sampler, SequentialSampler):
        lost.append(f"the order (if {type(sampler).__name__} shuffles, only it knows how)")
    if loader.num_workers:
        lost.append("random numbers drawn in its workers")
    return LoaderPosition(None, tuple(lost), f"Use {_make(loader)}.")


def _stream(loader: Any) -> LoaderPosition:
    lost = ["the place in the stream (it begins again with its first sample)"]
    able = isinstance(loader.dataset, Stateful)
    needs = "" if able else f", and give {type(loader.dataset).__name__} state_dict and load_state_dict"
    options = f"batch_size={loader.batch_size}, num_workers={loader.num_workers}, generator=torch.Generator()"
    return LoaderPosition(
        None, tuple(lost), f"Use torchdata.stateful_dataloader.StatefulDataLoader(dataset, {options}){needs}."
    )


def _make(loader: Any = None) -> str:
    """The line that makes a loader of ours with the same options."""
    if loader is None:
        return "surefoot.data.make_loader(dataset, batch_size, seed=0)"
    inner = loader.batch_sampler
    size = getattr(inner, "batch_size", None) or loader.batch_size or "batch_size"
    options = "" if not isinstance(_sampler(loader), SequentialSampler) else ", shuffle=False"
    options += ", drop_last=True" if getattr(inner, "drop_last", False) else ""
    options += f", num_workers={loader.num_workers}" if loader.num_workers else ""
    return f"surefoot.data.make_loader(dataset, {size}, seed=0{options})"


def _sampler(loader: Any) -> Any:
    """What decides the order, also inside a batch sampler."""
    outer = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return getattr(outer, "sampler", outer)


def _shared(generator: object, sampler: object) -> bool:
    return getattr(sampler, "generator", None) is generator


def _iterable(loader: object) -> bool:
    return isinstance(loader, Iterable) or hasattr(type(loader), "__getitem__")

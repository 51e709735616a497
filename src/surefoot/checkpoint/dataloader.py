"""How far the position of a user's data loader can be saved, judged by its interface, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from surefoot.checkpoint.tree import Stateful

_SEED = "torch's random numbers (each loop over the loader draws a seed, and a resumed run starts one more loop)"
_WORKERS = "random numbers that the dataset draws in worker processes, if any"
_IN_EPOCH = "the place in the epoch (it starts again with the first batch)"


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """How far the position of a loader can be restored."""

    stateful: Stateful | None
    """Saved and loaded with the run; None if there is nothing to save."""
    inexact: tuple[str, ...] = ()
    """What will not be the same after a resume, as text."""
    way_out: str = ""
    exact_if_guarded: tuple[str, ...] = ()
    """The parts of `inexact` that are exact in a loop over `guard.batches(loader)`."""

    @property
    def warning(self) -> str | None:
        """The warning for an unguarded loop; None if everything is exact."""
        return self._warning(self.inexact, self.way_out)

    def warning_for(self, *, announced: bool) -> str | None:
        """The warning for a guarded loop: with `guard.batches(loader)` or the like, or what is lost only without it."""
        if announced:
            lost = tuple(item for item in self.inexact if item not in self.exact_if_guarded)
            return self._warning(lost, self.way_out)
        return self._warning(self.exact_if_guarded, "Write `for batch in guard.batches(loader):`.")

    def _warning(self, lost: tuple[str, ...], way_out: str) -> str | None:
        if not lost:
            return None
        return f"the data will not continue exactly after a resume. Not saved: {'; '.join(lost)}. {way_out}"


class RngNeutralLoader:
    """A loader whose state can be read and set without a draw from torch's global generator.

    torchdata's loader creates an iterator to read its state if it has none yet, and that draws a seed.
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
    """What a resume can restore of this loader.

    Anything with `state_dict` and `load_state_dict` is trusted. For the loaders of torch and torchdata, known cases in
    which they continue with other samples are listed.
    """
    if isinstance(loader, type) or not (isinstance(loader, Stateful) or _iterable(loader)):
        raise TypeError(f"loader must be iterable or have a state_dict; {loader!r:.100} is neither")
    if isinstance(loader, Stateful):
        return _stateful(loader) if isinstance(loader, DataLoader) else LoaderPosition(loader)
    if isinstance(loader, DataLoader):
        return _stream(loader) if isinstance(loader.dataset, IterableDataset) else _plain(loader)
    if hasattr(loader, "__next__"):
        lost = f"the place in the data (a {type(loader).__name__} runs forward once and does not know its position)"
        return LoaderPosition(None, (lost,), f"Give it state_dict and load_state_dict, or use {_make()}.")
    way_out = f"Use {_make()}, or skip the batches seen so far: surefoot.data.skip_ahead(loader, n)."
    return LoaderPosition(None, (_IN_EPOCH,), way_out)


def _stateful(loader: Any) -> LoaderPosition:
    """StatefulDataLoader and the like, which save the position but not every order."""
    sampler, lost = _sampler(loader), []
    if isinstance(sampler, RandomSampler):
        lost.append("the order of the epochs (torch's RandomSampler does not save its generator)")
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
    exact_if_guarded = (_SEED,) if _SEED in lost else ()
    if isinstance(loader.dataset, IterableDataset):
        way_out = "Pass generator=torch.Generator() to the loader."
        return LoaderPosition(loader, tuple(lost), way_out, exact_if_guarded)
    # With shuffle=True, a generator on the loader would be the sampler's as well.
    sampler_option = "sampler=torchdata.stateful_dataloader.sampler.RandomSampler(dataset, generator=g) and "
    options = (sampler_option if hasattr(sampler, "generator") else "") + "generator=torch.Generator()"
    way_out = f"Use {_make(loader)}, or pass {options} to the loader."
    return LoaderPosition(loader, tuple(lost), way_out, exact_if_guarded)


def _plain(loader: Any) -> LoaderPosition:
    sampler, lost = _sampler(loader), [_IN_EPOCH]
    if isinstance(sampler, RandomSampler):
        whose = "torch's global" if sampler.generator is None else "a"
        lost.append(f"the order (shuffled by {whose} generator, which has advanced: samples repeat or are skipped)")
    elif isinstance(sampler, DistributedSampler):
        lost.append("the epoch of its DistributedSampler (unless the loop calls set_epoch)")
    elif not isinstance(sampler, SequentialSampler):
        lost.append(f"the order (if {type(sampler).__name__} shuffles, only it knows how)")
    if loader.num_workers:
        lost.append("random numbers drawn in its workers")
    return LoaderPosition(None, tuple(lost), f"Use {_make(loader)}.")


def _stream(loader: Any) -> LoaderPosition:
    lost = "the place in the stream (it starts again with the first sample)"
    able = isinstance(loader.dataset, Stateful)
    needs = "" if able else f", and give {type(loader.dataset).__name__} state_dict and load_state_dict"
    options = f"batch_size={loader.batch_size}, num_workers={loader.num_workers}, generator=torch.Generator()"
    way_out = f"Use torchdata.stateful_dataloader.StatefulDataLoader(dataset, {options}){needs}."
    return LoaderPosition(None, (lost,), way_out)


def _make(loader: Any = None) -> str:
    """The call that makes a surefoot loader with the same options."""
    if loader is None:
        return "surefoot.data.make_loader(dataset, batch_size, seed=0)"
    inner = loader.batch_sampler
    size = getattr(inner, "batch_size", None) or loader.batch_size or "batch_size"
    options = "" if not isinstance(_sampler(loader), SequentialSampler) else ", shuffle=False"
    options += ", drop_last=True" if getattr(inner, "drop_last", False) else ""
    options += f", num_workers={loader.num_workers}" if loader.num_workers else ""
    return f"surefoot.data.make_loader(dataset, {size}, seed=0{options})"


def _sampler(loader: Any) -> Any:
    """The sampler that decides the order, also inside a batch sampler."""
    outer = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return getattr(outer, "sampler", outer)


def _shared(generator: object, sampler: object) -> bool:
    return getattr(sampler, "generator", None) is generator


def _iterable(loader: object) -> bool:
    return isinstance(loader, Iterable) or hasattr(type(loader), "__getitem__")

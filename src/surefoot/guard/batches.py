"""Batches fetched through a guard, which acts right before and after each fetch."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")
Fetch = Callable[[Callable[[], Any]], Any]
"""Calls a function that fetches a batch, and returns the batch."""


class Batches(Generic[T]):
    """The batches of a loader, restarted by each `iter`; without a loader, step numbers without end."""

    def __init__(self, loader: Iterable[T] | None, fetch: Fetch | None, *, first: Callable[[], int]) -> None:
        self._loader, self._fetch, self._first = loader, fetch, first

    def __iter__(self) -> Iterator[T]:
        batches: Iterator[Any] = itertools.count(self._first()) if self._loader is None else iter(self._loader)
        return batches if self._fetch is None else _FetchedBatches(batches, self._fetch)

    def __len__(self) -> int:
        if self._loader is None:
            raise TypeError("guard.batches() without a loader has no length: it counts steps until the loop ends")
        return len(self._loader)  # type: ignore[arg-type]


class _FetchedBatches(Iterator[T]):
    def __init__(self, batches: Iterator[T], fetch: Fetch) -> None:
        self._batches, self._fetch = batches, fetch

    def __next__(self) -> T:
        return self._fetch(self._batches.__next__)


@runtime_checkable
class HasFetchHook(Protocol):
    """A loader that lets a hook run each of its fetches, as the loaders of `surefoot.data` do."""

    through: Fetch | None


class Fetcher(Protocol):
    def fetch(self, get: Callable[[], T]) -> T: ...


class FetchHook:
    """Runs a loader's fetches through a guard; plain fetches once the guard is gone, and in a copy of the loader."""

    def __init__(self, guard: Fetcher | None = None) -> None:
        self._guard = None if guard is None else weakref.ref(guard)

    def __call__(self, get: Callable[[], T]) -> T:
        guard = None if self._guard is None else self._guard()
        return get() if guard is None else guard.fetch(get)

    def __reduce__(self) -> tuple[type[FetchHook], tuple[()]]:
        return FetchHook, ()

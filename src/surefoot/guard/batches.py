"""Batches fetched through a guard, which learns of the moment before each of them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")
Fetch = Callable[[Callable[[], Any]], Any]
"""Calls a function that fetches a batch, and does what is to be done before and after it."""


class Batches(Generic[T]):
    """The batches of a loader, as often as they are asked for; without a loader the numbers of the steps, endlessly."""

    def __init__(self, loader: Iterable[T] | None, fetch: Fetch | None, *, first: Callable[[], int]) -> None:
        self._loader, self._fetch, self._first = loader, fetch, first

    def __iter__(self) -> Iterator[T]:
        batches: Iterator[Any] = itertools.count(self._first()) if self._loader is None else iter(self._loader)
        return batches if self._fetch is None else _Fetched(batches, self._fetch)

    def __len__(self) -> int:
        if self._loader is None:
            raise TypeError("guard.batches() without a loader has no length: it counts steps until the loop ends")
        return len(self._loader)  # type: ignore[arg-type]


class _Fetched(Iterator[T]):
    def __init__(self, batches: Iterator[T], fetch: Fetch) -> None:
        self._batches, self._fetch = batches, fetch

    def __next__(self) -> T:
        return self._fetch(self._batches.__next__)


@runtime_checkable
class FetchesThrough(Protocol):
    """A loader that hands each of its fetches to whoever wants to know of them, as those of `surefoot.data`."""

    through: Fetch | None


class Fetching(Protocol):
    def fetch(self, get: Callable[[], T]) -> T: ...


class Through:
    """Hands a loader's fetches to a guard; once that is gone, and in a copy of the loader, they go their way alone."""

    def __init__(self, guard: Fetching | None = None) -> None:
        self._guard = None if guard is None else weakref.ref(guard)

    def __call__(self, get: Callable[[], T]) -> T:
        guard = None if self._guard is None else self._guard()
        return get() if guard is None else guard.fetch(get)

    def __reduce__(self) -> tuple[type[Through], tuple[()]]:
        return Through, ()

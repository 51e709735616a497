"""Data to train on, in plain torch, and loaders that go on exactly where they were: nothing here knows about a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.data.text import batches, split, standard_library

if TYPE_CHECKING:
    from surefoot.data.ahead import skip_ahead
    from surefoot.data.chance import keyed_generator, keyed_numpy
    from surefoot.data.corpus import TrainingData, check_vocab, open_data
    from surefoot.data.loaders import Loader, make_loader
    from surefoot.data.position import Position, WrongPosition
    from surefoot.data.problem import DataError, UnreadableSample
    from surefoot.data.sampler import Sampler

__all__ = [
    "DataError",
    "Loader",
    "Position",
    "Sampler",
    "TrainingData",
    "UnreadableSample",
    "WrongPosition",
    "batches",
    "check_vocab",
    "keyed_generator",
    "keyed_numpy",
    "make_loader",
    "open_data",
    "skip_ahead",
    "split",
    "standard_library",
]

# Looked up when asked for: only loaders need torchdata.
_HOMES = {
    "DataError": "problem",
    "Loader": "loaders",
    "Opened": "corpus",
    "Position": "position",
    "Sampler": "sampler",
    "Unreadable": "problem",
    "WrongPosition": "position",
    "check_vocab": "corpus",
    "keyed_generator": "chance",
    "keyed_numpy": "chance",
    "make_loader": "loaders",
    "open_data": "corpus",
    "skip_ahead": "ahead",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'surefoot.data' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"surefoot.data.{_HOMES[name]}"), name)

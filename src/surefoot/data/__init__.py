"""Datasets for language models and user datasets, and loaders that resume exactly where they stopped; plain torch.

| file | contents |
|---|---|
| `corpus.py` | `open_data`: from the data section of a recipe to loaders |
| `loaders.py`, `sampler.py` | `make_loader`, `skip_ahead`, and the resumable batch sampler |
| `epoch_order.py` | the permutation of each epoch, and the saved position in it |
| `augmentation_rng.py` | random generators that belong to a sample, not to a worker |
| `resilient_loaders.py` | training and eval loaders that replace unreadable samples |
| `language_dataset.py` | token windows and whole texts as samples, the eval split |
| `source_files.py` | files of a recipe, found and fingerprinted |
| `text_files.py`, `chat.py`, `tokenizers.py` | texts and conversations to tokens |
| `token_store.py`, `token_cache.py` | tokens in memory or on disk, tokenized once |
| `stdlib_corpus.py` | Python's standard library as a small corpus |
| `sample_sources.py` | the file and line, or the row, of a sample |
| `data_error.py` | `DataError` and unreadable samples |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.data.stdlib_corpus import batches, split, standard_library

if TYPE_CHECKING:
    from surefoot.data.augmentation_rng import keyed_generator, keyed_numpy
    from surefoot.data.corpus import TrainingData, check_vocab, open_data
    from surefoot.data.data_error import DataError, UnreadableSample
    from surefoot.data.epoch_order import Position, WrongPosition
    from surefoot.data.loaders import Loader, make_loader
    from surefoot.data.sampler import Sampler, skip_ahead

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

# Imported on first use: only the loaders need torchdata, which is an optional dependency.
_MODULES = {
    "DataError": "data_error",
    "Loader": "loaders",
    "Position": "epoch_order",
    "Sampler": "sampler",
    "TrainingData": "corpus",
    "UnreadableSample": "data_error",
    "WrongPosition": "epoch_order",
    "check_vocab": "corpus",
    "keyed_generator": "augmentation_rng",
    "keyed_numpy": "augmentation_rng",
    "make_loader": "loaders",
    "open_data": "corpus",
    "skip_ahead": "sampler",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'surefoot.data' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"surefoot.data.{_MODULES[name]}"), name)

"""A corpus that every Python installation has: the source of the standard library, one token per byte."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VOCAB = 256
"""One token for each value of a byte."""

_SKIPPED_DIRS = frozenset(
    ["site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"]
)
"""Third-party code, tests, and data tables."""


def standard_library(limit: int | None = None) -> Tensor:
    """The bytes of the standard library's source files as uint8, the first `limit` of them if given."""
    corpus = bytearray()
    for path in library_files():
        corpus += path.read_bytes() + b"\n"
        if limit is not None and len(corpus) >= limit:
            break
    return torch.frombuffer(corpus[:limit], dtype=torch.uint8)


def library_files() -> list[Path]:
    """The standard library's source files in a fixed order that mixes the packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_DIRS]
        files += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    if not files:
        raise ValueError(f"found no .py file in {root}: this Python ships without the source of its standard library")
    files.sort(key=lambda relative: (zlib.crc32(relative.as_posix().encode()), relative))
    return [root / relative for relative in files]


def split(corpus: Tensor, *, held_out: float = 0.1) -> tuple[Tensor, Tensor]:
    """Split into the front part for training and the last `held_out` fraction for evaluation."""
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be a fraction between 0 and 1, got {held_out}")
    cut = len(corpus) - round(len(corpus) * held_out)
    return corpus[:cut], corpus[cut:]


def batches(corpus: Tensor, *, batch: int, context: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless random windows, int64 [batch, context + 1]; each batch depends on seed and step alone.

    `start` is the first step, so that a run can resume exactly where it stopped.
    """
    if len(corpus) <= context:
        raise ValueError(f"a window takes {context + 1} bytes, the corpus has {len(corpus)}: shorten the context")
    return _windows(corpus, batch=batch, context=context, seed=seed, step=start)


def _windows(corpus: Tensor, *, batch: int, context: int, seed: int, step: int) -> Iterator[Tensor]:
    offsets = torch.arange(context + 1)
    while True:
        starts = np.random.default_rng((seed, step)).integers(0, len(corpus) - context, size=batch)
        yield corpus[torch.from_numpy(starts)[:, None] + offsets].long()
        step += 1

"""A corpus everyone already has: the source of Python's own standard library, byte by byte."""

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

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Other people's code, tests, and tables that are no prose of any kind."""


def standard_library(limit: int | None = None) -> Tensor:
    """The bytes of the standard library's source files as uint8, the first `limit` of them when it is given."""
    corpus = bytearray()
    for path in library_files():
        corpus += path.read_bytes() + b"\n"
        if limit is not None and len(corpus) >= limit:
            break
    return torch.frombuffer(corpus[:limit], dtype=torch.uint8)


def library_files() -> list[Path]:
    """The standard library's source files in an order that mixes the packages and is the same for everyone."""
    home = Path(sysconfig.get_paths()["stdlib"])
    kept: list[Path] = []
    for folder, inner, files in os.walk(home):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        kept += [Path(folder, name).relative_to(home) for name in files if name.endswith(".py")]
    if not kept:
        raise ValueError(f"expected Python's library source in {home}, found no .py file: this Python ships without it")
    kept.sort(key=lambda short: (zlib.crc32(short.as_posix().encode()), short))
    return [home / short for short in kept]


def split(corpus: Tensor, *, held_out: float = 0.1) -> tuple[Tensor, Tensor]:
    """The front part to train on and the last `held_out` share to validate on."""
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is a share between 0 and 1, got {held_out}")
    cut = len(corpus) - round(len(corpus) * held_out)
    return corpus[:cut], corpus[cut:]


def batches(corpus: Tensor, *, batch: int, context: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Endless random windows, int64 [batch, context + 1]; each batch depends on seed and step alone.

    `start` is the step to begin at, so a run can go on exactly where it left off.
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

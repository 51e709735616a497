"""A run to the files of one folder, each process its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

from surefoot.state.disk.pieces import Pieces
from surefoot.state.disk.shards import Opener, Written, create, write_shards
from surefoot.state.disk.told import state_file


def write_pieces(folder: Path, pieces: Pieces, *, rank: int = 0, opener: Opener | None = None) -> list[Written]:
    """Write what this process has to, flushed."""
    text = json.dumps(pieces.told, allow_nan=False).encode()
    path = folder / state_file(rank)
    with (opener or create)(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    told = Written(path.name, len(text), xxhash.xxh3_128(text).hexdigest())
    return [write_shards(folder, rank, pieces.shards, opener), told]

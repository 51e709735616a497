"""A run to the files of one folder, each process its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

from surefoot.checkpoint.format.hashing import Hashing
from surefoot.checkpoint.format.pieces import Pieces
from surefoot.checkpoint.format.shards import Opener, Written, create, write_shards
from surefoot.checkpoint.format.state_files import state_file


def write_pieces(
    folder: Path, pieces: Pieces, *, rank: int = 0, opener: Opener | None = None, hashing: Hashing | None = None
) -> list[Written]:
    """Write what this process has to, flushed; with its hash, which what is written is read for as well."""
    beside = None if hashing is None else hashing.beside(pieces)
    shards = write_shards(folder, rank, pieces.shards, opener, beside)
    if hashing is not None:
        pieces.told["hash"] = hashing.whole()
    text = json.dumps(pieces.told, allow_nan=False).encode()
    path = folder / state_file(rank)
    with (opener or create)(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return [shards, Written(path.name, len(text), xxhash.xxh3_128(text).hexdigest())]

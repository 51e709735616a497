"""Saves a run to a folder and loads it, for the tests."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.format.hashing import hash_state, write_pieces
from surefoot.checkpoint.format.load_checkpoint import LoadResult, load_checkpoint
from surefoot.checkpoint.format.param_names import name_state
from surefoot.checkpoint.format.pieces import RankPieces, split_state
from surefoot.checkpoint.train_state import TrainState


def save(whole: TrainState, folder: Path, **which: int) -> RankPieces:
    folder.mkdir(exist_ok=True)
    pieces = split_state(whole.capture(), name_state(whole), **which)
    write_pieces(folder, pieces, rank=which.get("rank", 0))
    return pieces


def load(whole: TrainState, folder: Path, **which: int) -> LoadResult:
    return load_checkpoint(folder, whole, name_state(whole), **which)


def hashed(whole: TrainState, *, live: bool = True) -> str:
    return hash_state(whole.collect() if live else whole.capture(), name_state(whole))


def there_and_back(whole: TrainState, other: TrainState, folder: Path) -> LoadResult:
    """Save one run and load it into another; both are the same in the end."""
    pieces = save(whole, folder)
    assert not pieces.left_out
    before = hashed(whole, live=False)
    restored = load(other, folder)
    assert hashed(other) == before
    return restored

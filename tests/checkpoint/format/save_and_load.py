"""Save a run to a folder, load it and hash it."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.format.hashing import hash_state, write_pieces
from surefoot.checkpoint.format.load_checkpoint import LoadResult, load_checkpoint
from surefoot.checkpoint.format.param_names import name_state
from surefoot.checkpoint.format.pieces import RankPieces, split_state
from surefoot.checkpoint.train_state import TrainState


def save(train_state: TrainState, folder: Path, **which: int) -> RankPieces:
    folder.mkdir(exist_ok=True)
    pieces = split_state(train_state.capture(), name_state(train_state), **which)
    write_pieces(folder, pieces, rank=which.get("rank", 0))
    return pieces


def load(train_state: TrainState, folder: Path, **which: int) -> LoadResult:
    return load_checkpoint(folder, train_state, name_state(train_state), **which)


def hashed(train_state: TrainState, *, live: bool = True) -> str:
    return hash_state(train_state.collect() if live else train_state.capture(), name_state(train_state))


def save_then_load(train_state: TrainState, other: TrainState, folder: Path) -> LoadResult:
    """Save one run and load it into another; both are the same in the end."""
    pieces = save(train_state, folder)
    assert not pieces.left_out
    before = hashed(train_state, live=False)
    restored = load(other, folder)
    assert hashed(other) == before
    return restored

"""A run to a folder and back, as the tests want it."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.format.hashing import hash_of
from surefoot.checkpoint.format.load import Restored, put_together
from surefoot.checkpoint.format.param_names import names_in
from surefoot.checkpoint.format.pieces import Pieces, take_apart
from surefoot.checkpoint.format.write_files import write_pieces
from surefoot.checkpoint.train_state import TrainState


def save(whole: TrainState, folder: Path, **which: int) -> Pieces:
    folder.mkdir(exist_ok=True)
    pieces = take_apart(whole.take(), names_in(whole), **which)
    write_pieces(folder, pieces, rank=which.get("rank", 0))
    return pieces


def load(whole: TrainState, folder: Path, **which: int) -> Restored:
    return put_together(folder, whole, names_in(whole), **which)


def hashed(whole: TrainState, *, live: bool = True) -> str:
    return hash_of(whole.look() if live else whole.take(), names_in(whole))


def there_and_back(whole: TrainState, other: TrainState, folder: Path) -> Restored:
    """Save one run and load it into another; both are the same in the end."""
    pieces = save(whole, folder)
    assert not pieces.left_out
    before = hashed(whole, live=False)
    restored = load(other, folder)
    assert hashed(other) == before
    return restored

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.checkpoint.store import CheckpointStore

MEMORY = Path("/dev/shm")


class Saver:
    """Saves checkpoints of two files that contain the step."""

    def __call__(self, store: CheckpointStore, step: int, attempt: int | None = None, **about: object) -> str:
        with store.writing(step, step if attempt is None else attempt) as draft:
            (draft.folder / "weights.safetensors").write_bytes(b"weights %d " % step * 100)
            (draft.folder / "rank1").mkdir()
            (draft.folder / "rank1" / "rest.json").write_text(f'{{"step": {step}}}')
            return store.commit(draft, None, about).checkpoint.name


@pytest.fixture
def save() -> Saver:
    return Saver()


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder on a RAM disk where there is one: thousands of flushes should not wait for a disk."""
    parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="surefoot-", dir=parent) as folder:
        yield Path(folder)

"""Texts are tokenized once: by one process while the others wait, into files that appear whole or not at all."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from surefoot.data.problem import DataError, UnreadableSample
from surefoot.data.store import FileTokens, MemoryTokens, TokenStore, TokenWriter
from surefoot.data.texts import ReadReport

_VERSION = 1
"""Of what is written: tokens of another version are made anew."""


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """Something to tokenize: `write` does it, `name` is another one for every other result."""

    name: str
    vocab: int
    has_loss_mask: bool
    write: Callable[[TokenWriter], ReadReport]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.vocab <= 1 << 8 else np.uint16 if self.vocab <= 1 << 16 else np.uint32)


def default_cache_dir() -> Path:
    """`$SUREFOOT_CACHE`, or `surefoot` in the user's folder for caches; it may be deleted at any time."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SUREFOOT_CACHE") or Path(home) / "surefoot")


def tokenize_in_memory(work: TokenizeJob) -> tuple[TokenStore, ReadReport]:
    """For what is small and quickly made."""
    tokens, counted = io.BytesIO(), io.BytesIO() if work.has_loss_mask else None
    writer = TokenWriter(tokens, work.dtype, counted)
    told = work.write(writer)
    marks = None if counted is None else MemoryTokens(np.frombuffer(counted.getbuffer(), np.uint8))
    return TokenStore(
        MemoryTokens(np.frombuffer(tokens.getbuffer(), work.dtype)), *writer.tables(), loss_mask=marks
    ), told


def tokenize_cached(work: TokenizeJob, folder: Path) -> tuple[TokenStore, ReadReport]:
    """From the folder when it is there already, else made there first."""
    home = folder / "tokens" / xxhash.xxh3_128_hexdigest(f"{_VERSION}\0{work.name}".encode())
    if not (home / "about.json").exists():
        try:
            _make(work, home)
        except OSError as error:
            raise DataError(
                f"cannot write tokens to {home.parent}: {error.strerror or error}. Set SUREFOOT_CACHE to a folder with "
                "room, on a disk that all processes see."
            ) from None
    return _opened(work, home)


def _make(work: TokenizeJob, home: Path) -> None:
    from filelock import FileLock

    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(home.with_suffix(".lock")):  # let go by the system when its holder dies
        if (home / "about.json").exists():
            return
        draft = Path(tempfile.mkdtemp(prefix=f"{home.name}.", suffix=".draft", dir=home.parent))
        try:
            _write(work, draft)
            os.rename(draft, home)
        except OSError:
            if not (home / "about.json").exists():  # where locks do not hold, another may have been quicker
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _write(work: TokenizeJob, draft: Path) -> None:
    with (draft / "tokens.bin").open("wb") as tokens, (draft / "counted.bin").open("wb") as counted:
        writer = TokenWriter(tokens, work.dtype, counted if work.has_loss_mask else None)
        told = work.write(writer)
        for file in (tokens, counted):
            file.flush()
            os.fsync(file.fileno())
    offsets, digests = writer.tables()
    np.save(draft / "offsets.npy", offsets)
    np.save(draft / "digests.npy", digests)
    (draft / "about.json").write_text(json.dumps({"work": work.name, **asdict(told)}), encoding="utf-8")


def _opened(work: TokenizeJob, home: Path) -> tuple[TokenStore, ReadReport]:
    try:
        about = json.loads((home / "about.json").read_text(encoding="utf-8"))
        told = ReadReport([UnreadableSample(**one) for one in about["unreadable"]], list(about["notes"]))
        offsets = np.load(home / "offsets.npy", allow_pickle=False)
        digests = np.load(home / "digests.npy", allow_pickle=False)
        length = int(offsets[-1])
        if (home / "tokens.bin").stat().st_size != length * work.dtype.itemsize:
            raise ValueError("tokens.bin has another size")
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(
            f"the tokens kept in {home} are damaged ({error}): delete that folder, they are made anew"
        ) from None
    counted = FileTokens(home / "counted.bin", np.dtype(np.uint8), length=length) if work.has_loss_mask else None
    return TokenStore(
        FileTokens(home / "tokens.bin", work.dtype, length=length), offsets, digests, loss_mask=counted
    ), told

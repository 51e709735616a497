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

from surefoot.data.problem import DataError, Unreadable
from surefoot.data.store import InFile, InMemory, Store, Writer
from surefoot.data.texts import Told

_VERSION = 1
"""Of what is written: tokens of another version are made anew."""


@dataclass(frozen=True, slots=True)
class Work:
    """Something to tokenize: `write` does it, `name` is another one for every other result."""

    name: str
    vocab: int
    masked: bool
    write: Callable[[Writer], Told]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.vocab <= 1 << 8 else np.uint16 if self.vocab <= 1 << 16 else np.uint32)


def default_folder() -> Path:
    """`$SUREFOOT_CACHE`, or `surefoot` in the user's folder for caches; it may be deleted at any time."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SUREFOOT_CACHE") or Path(home) / "surefoot")


def in_memory(work: Work) -> tuple[Store, Told]:
    """For what is small and quickly made."""
    tokens, counted = io.BytesIO(), io.BytesIO() if work.masked else None
    writer = Writer(tokens, work.dtype, counted)
    told = work.write(writer)
    marks = None if counted is None else InMemory(np.frombuffer(counted.getbuffer(), np.uint8))
    return Store(InMemory(np.frombuffer(tokens.getbuffer(), work.dtype)), *writer.tables(), counted=marks), told


def in_files(work: Work, folder: Path) -> tuple[Store, Told]:
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


def _make(work: Work, home: Path) -> None:
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


def _write(work: Work, draft: Path) -> None:
    with (draft / "tokens.bin").open("wb") as tokens, (draft / "counted.bin").open("wb") as counted:
        writer = Writer(tokens, work.dtype, counted if work.masked else None)
        told = work.write(writer)
        for file in (tokens, counted):
            file.flush()
            os.fsync(file.fileno())
    offsets, digests = writer.tables()
    np.save(draft / "offsets.npy", offsets)
    np.save(draft / "digests.npy", digests)
    (draft / "about.json").write_text(json.dumps({"work": work.name, **asdict(told)}), encoding="utf-8")


def _opened(work: Work, home: Path) -> tuple[Store, Told]:
    try:
        about = json.loads((home / "about.json").read_text(encoding="utf-8"))
        told = Told([Unreadable(**one) for one in about["unreadable"]], list(about["notes"]))
        offsets = np.load(home / "offsets.npy", allow_pickle=False)
        digests = np.load(home / "digests.npy", allow_pickle=False)
        length = int(offsets[-1])
        if (home / "tokens.bin").stat().st_size != length * work.dtype.itemsize:
            raise ValueError("tokens.bin has another size")
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(
            f"the tokens kept in {home} are damaged ({error}): delete that folder, they are made anew"
        ) from None
    counted = InFile(home / "counted.bin", np.dtype(np.uint8), length=length) if work.masked else None
    return Store(InFile(home / "tokens.bin", work.dtype, length=length), offsets, digests, counted=counted), told

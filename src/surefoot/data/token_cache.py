"""Tokenizes texts once: one process writes the cache while the others wait, and files appear whole or not at all."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from surefoot.data.data_error import DataError, ReadReport, UnreadableSample
from surefoot.data.sample_sources import TextSources
from surefoot.data.token_store import FileTokens, MemoryTokens, TokenStore, TokenWriter

_VERSION = 1
"""Of the cache format: caches of another version are rebuilt."""
Advance = Callable[[int], None]
"""Called with the number of bytes that were processed."""
_MIN_PROGRESS_BYTES = 32 << 20
_PROGRESS_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """A tokenization: `write` runs it, `name` is different for every different result."""

    name: str
    vocab: int
    has_loss_mask: bool
    write: Callable[[TokenWriter], ReadReport]
    files: Sequence[Path] = ()
    """The files that are tokenized."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.vocab <= 1 << 8 else np.uint16 if self.vocab <= 1 << 16 else np.uint32)


def default_cache_dir() -> Path:
    """`$SUREFOOT_CACHE`, or `surefoot` in the user's cache folder; may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SUREFOOT_CACHE") or Path(base) / "surefoot")


def tokenize_in_memory(job: TokenizeJob) -> tuple[TokenStore, ReadReport]:
    """For small texts."""
    tokens, mask = io.BytesIO(), io.BytesIO() if job.has_loss_mask else None
    writer = TokenWriter(tokens, job.dtype, mask)
    report = job.write(writer)
    loss_mask = None if mask is None else MemoryTokens(np.frombuffer(mask.getbuffer(), np.uint8))
    array = MemoryTokens(np.frombuffer(tokens.getbuffer(), job.dtype))
    return TokenStore(array, *writer.tables(), loss_mask=loss_mask, sources=writer.sources(job.files)), report


def tokenize_cached(job: TokenizeJob, folder: Path) -> tuple[TokenStore, ReadReport]:
    """Open the tokens in the cache folder, after writing them if they are not there yet."""
    entry = folder / "tokens" / xxhash.xxh3_128_hexdigest(f"{_VERSION}\0{job.name}".encode())
    if not (entry / "about.json").exists():
        try:
            _create_entry(job, entry)
        except OSError as error:
            raise DataError(
                f"cannot write tokens to {entry.parent}: {error.strerror or error}. Set SUREFOOT_CACHE to a folder "
                "with free space, on a disk that all processes share."
            ) from None
    return _open_entry(job, entry)


def _create_entry(job: TokenizeJob, entry: Path) -> None:
    from filelock import FileLock

    entry.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(entry.with_suffix(".lock")):  # the operating system releases it when its holder dies
        if (entry / "about.json").exists():
            return
        draft = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".draft", dir=entry.parent))
        try:
            _write_entry(job, draft)
            os.rename(draft, entry)
        except OSError:
            if not (entry / "about.json").exists():  # on disks without locks, another process may have been faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _write_entry(job: TokenizeJob, draft: Path) -> None:
    with (draft / "tokens.bin").open("wb") as tokens, (draft / "counted.bin").open("wb") as mask:
        writer = TokenWriter(tokens, job.dtype, mask if job.has_loss_mask else None)
        report = job.write(writer)
        for file in (tokens, mask):
            file.flush()
            os.fsync(file.fileno())
    offsets, digests = writer.tables()
    np.save(draft / "offsets.npy", offsets)
    np.save(draft / "digests.npy", digests)
    if (sources := writer.sources(job.files)) is not None:
        np.save(draft / "places.npy", sources.places)
    (draft / "about.json").write_text(json.dumps({"work": job.name, **asdict(report)}), encoding="utf-8")


def _open_entry(job: TokenizeJob, entry: Path) -> tuple[TokenStore, ReadReport]:
    try:
        about = json.loads((entry / "about.json").read_text(encoding="utf-8"))
        report = ReadReport([UnreadableSample(**sample) for sample in about["unreadable"]], list(about["notes"]))
        offsets = np.load(entry / "offsets.npy", allow_pickle=False)
        digests = np.load(entry / "digests.npy", allow_pickle=False)
        sources = _open_sources(job, entry / "places.npy", len(digests))
        length = int(offsets[-1])
        if (entry / "tokens.bin").stat().st_size != length * job.dtype.itemsize:
            raise ValueError("tokens.bin has the wrong size")
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise DataError(
            f"the cached tokens in {entry} are damaged ({error}): delete that folder, and they are written again"
        ) from None
    loss_mask = FileTokens(entry / "counted.bin", np.dtype(np.uint8), length=length) if job.has_loss_mask else None
    tokens = FileTokens(entry / "tokens.bin", job.dtype, length=length)
    return TokenStore(tokens, offsets, digests, loss_mask=loss_mask, sources=sources), report


def _open_sources(job: TokenizeJob, path: Path, num_texts: int) -> TextSources | None:
    """Where the texts come from; None in a cache that an earlier version has written."""
    if not path.exists() or not job.files:
        return None
    places = np.load(path, allow_pickle=False)
    if places.shape != (num_texts, 2) or (
        num_texts and not 0 <= places[:, 0].min() <= places[:, 0].max() < len(job.files)
    ):
        raise ValueError("places.npy does not fit the texts")
    return TextSources(tuple(job.files), places)


@contextmanager
def show_progress(total: int, label: str) -> Iterator[Advance]:
    """Show progress on standard error: a bar on a terminal, a line every 30 s elsewhere, nothing below 32 MiB."""
    if total < _MIN_PROGRESS_BYTES:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda size: bar.advance(task, size)
    else:
        yield _ProgressLines(total, label)


class _ProgressLines:
    def __init__(self, total: int, label: str) -> None:
        self._total, self._label, self._done = total, label, 0
        self._printed_at = time.monotonic()

    def __call__(self, size: int) -> None:
        self._done += size
        if time.monotonic() - self._printed_at >= _PROGRESS_SECONDS:
            self._printed_at = time.monotonic()
            print(
                f"{self._label}: {self._done / self._total:.0%} of {self._total >> 20} MB", file=sys.stderr, flush=True
            )

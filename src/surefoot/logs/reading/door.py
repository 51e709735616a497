"""The front door: whatever somebody has, read by the reader that it fits."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

from surefoot.logs import checkpoint
from surefoot.logs.reading import binary, delimited, folder, jsonlog, rundir
from surefoot.logs.reading.console import textlog
from surefoot.logs.reading.events import tensorboardlog, wandblog
from surefoot.logs.reading.source import LogSource
from surefoot.logs.table import LogTable, UnreadableInput


class FormatReader(Protocol):
    """A format: how it is told, and how it is read."""

    FORMAT: str
    fits: Callable[[bytes], bool]
    read: Callable[[LogSource], LogTable | list[LogTable]]


CHECKPOINT = "checkpoint"
READERS = tuple(cast(FormatReader, one) for one in (tensorboardlog, wandblog, jsonlog, delimited))
"""In the order in which they are asked; text is what is left."""


def read_log(path: str | os.PathLike[str]) -> list[LogTable]:
    """The runs in a file, in a folder, or in what is piped in (`-`); raises `Unreadable`."""
    name = os.fspath(path)
    try:
        if name != "-" and Path(name).is_dir():
            return folder.read_folder(name, read_file)
        return read_file(name)
    except (OSError, MemoryError) as error:
        raise UnreadableInput(f"{name} cannot be read: {error or type(error).__name__}") from None


def read_file(path: str) -> list[LogTable]:
    """The runs in one file."""
    if path != "-" and (run := rundir.run_dir_of(path)) is not None:
        return [rundir.read_run_dir(run)]
    with LogSource.open(path) as source:
        kind = detect_format(source.head)
        if kind == CHECKPOINT:
            raise UnreadableInput(f"{path} is a checkpoint, not a log")
        if not source.head and source.read_error:
            raise UnreadableInput(f"{path} cannot be unpacked: {source.read_error}")
        if reason := binary.why_not_a_log(source.head) if kind == textlog.FORMAT else "":
            raise UnreadableInput(f"{path} {reason}")
        found = _read_format(source, kind)
        tables = found if isinstance(found, list) else [found]
        if source.read_error and not any(source.read_error in note for table in tables for note in table.notes):
            told = f"the file could not be read to its end ({source.read_error}): this is what stands before"
            tables = [replace(table, notes=(*table.notes, told)) for table in tables]
        return tables


def detect_format(head: bytes) -> str:
    """The format of a file by its first bytes: checkpoint, tensorboard, wandb, jsonl, csv, or text for all the rest."""
    for reader in READERS[:2]:
        if reader.fits(head):
            return reader.FORMAT
    if checkpoint.fits(head):
        return CHECKPOINT
    if binary.why_not_a_log(head):
        return textlog.FORMAT
    return next((reader.FORMAT for reader in READERS[2:] if reader.fits(head)), textlog.FORMAT)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a file or a folder holds weights and no log."""
    name = os.fspath(path)
    if name != "-" and Path(name).is_dir():
        return checkpoint.fits_folder(name) and not checkpoint.log_beside(name)
    if name == "-" or not Path(name).is_file():
        return False
    with LogSource.open(name) as source:
        return detect_format(source.head) == CHECKPOINT


def _read_format(source: LogSource, kind: str) -> LogTable | list[LogTable]:
    reader = next((one for one in READERS if kind == one.FORMAT), None)
    if reader is None:
        return textlog.read(source)
    try:
        return reader.read(source)
    except UnreadableInput:
        if reader in READERS[:2] or source.path == "-":
            raise
        with LogSource.open(source.path) as again:
            try:
                found = textlog.read(again)
            except UnreadableInput:
                found = None
        if found is None or not found.columns:
            raise
        return found

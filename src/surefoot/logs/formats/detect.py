"""Detects the format of a log and reads it; explains why a file is not a log."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

from surefoot.inspect import folder_has_log, is_checkpoint_file, is_checkpoint_folder
from surefoot.logs.formats import csv_log, json_log, log_folder, nanogpt_log, surefoot_run, tensorboard_log, wandb_log
from surefoot.logs.formats.console import console_log
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable

_EXPORT_AS_TEXT = "Save it as text (CSV or JSONL) and pass that"
_MAGICS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "the pointer of Git LFS, not the file itself", "Fetch it: git lfs pull"),
    (b"\x89PNG", "an image", "Pass the log that it was drawn from"),
    (b"\xff\xd8\xff", "an image", "Pass the log that it was drawn from"),
    (b"GIF8", "an image", "Pass the log that it was drawn from"),
    (b"RIFF", "a sound, film or image", "Pass the log of the run"),
    (b"%PDF", "a PDF document", "Pass the log of the run"),
    (b"\x7fELF", "a program", "Pass the log of the run"),
    (b"MZ\x90\0", "a program", "Pass the log of the run"),
    (b"\xcf\xfa\xed\xfe", "a program", "Pass the log of the run"),
    (b"\x89HDF", "an HDF5 file, as Keras writes them", "Save the weights as safetensors to have them looked at"),
    (b"\x93NUMPY", "a NumPy array", "Load it and pass the array to surefoot.diagnose"),
    (b"PAR1", "a Parquet file", _EXPORT_AS_TEXT),
    (b"ARROW1", "an Arrow file", _EXPORT_AS_TEXT),
    (b"SQLite format 3\0", "an SQLite database", "Export the metrics of the run as CSV and pass that"),
    (b"GGUF", "a GGUF model, whose weights are quantised", "Pass the checkpoint that it was made from"),
    (b"7z\xbc\xaf", "a 7z archive", "Unpack it and pass the log in it"),
    (b"Rar!", "a RAR archive", "Unpack it and pass the log in it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "Unpack it with `zstd -d` and pass the result, or pipe it in"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "Unpack it and pass the result, or pipe it in"),
    (b"PK\x03\x04", "a zip archive", "Unpack it and pass the log in it"),
    (b"PK\x05\x06", "an empty zip archive", "Pass the log of the run"),
)
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x0b\x0c\x08\x1b\x1e\x07") | {127})


def describe_known_binary(head: bytes) -> str:
    """What a file of a known binary type is, and what to do instead; empty if the type is unknown."""
    for magic, what, way_out in _MAGICS:
        if head.startswith(magic):
            if b"xl/workbook" in head or b"xl/worksheets" in head:
                return f"is an Excel workbook. {_EXPORT_AS_TEXT}"
            return f"is {what}. {way_out}"
    return "is a tar archive. Unpack it and pass the log in it" if head[257:262] == b"ustar" else ""


def why_not_a_log(head: bytes) -> str:
    """Why a file is not a log, and what to do instead; empty if it may be one."""
    if reason := describe_known_binary(head):
        return reason
    text = head.replace(b"\0", b"")
    if not text.strip():
        return "holds nothing but NUL bytes: a crash took what was in it" if head.strip() else "is empty"
    return (
        "is a binary file of a kind unknown here. Pass a log as text, a checkpoint or a folder"
        if _is_binary(text)
        else ""
    )


def _is_binary(text: bytes) -> bool:
    """Whether bytes are hardly text: many control characters, or neither UTF-8 nor a Latin alphabet."""
    controls = len(text) - len(text.translate(None, _CONTROL))
    if controls > 0.05 * len(text) + 2:
        return True
    high = sum(byte >= 128 for byte in text)
    if high <= 0.3 * len(text):
        return False
    return text.decode("utf-8", "replace").count("\ufffd") > 0.1 * len(text)


class FormatReader(Protocol):
    """A format module: `fits` detects the format from the first bytes, `read` reads it."""

    FORMAT: str
    fits: Callable[[bytes], bool]
    read: Callable[[LogSource], LogTable | list[LogTable]]


CHECKPOINT = "checkpoint"
READERS = tuple(cast(FormatReader, module) for module in (tensorboard_log, wandb_log, nanogpt_log, json_log, csv_log))
"""In the order they are tried; anything else is console text."""


def read_log(path: str | os.PathLike[str]) -> list[LogTable]:
    """The runs in a file, a folder, or standard input (`-`); raises `UnreadableInput`."""
    name = os.fspath(path)
    try:
        if name != "-" and Path(name).is_dir():
            return log_folder.read_folder(name, read_file)
        return read_file(name)
    except (OSError, MemoryError) as error:
        raise UnreadableInput(f"{name} cannot be read: {error or type(error).__name__}") from None


def read_file(path: str) -> list[LogTable]:
    """The runs in one file."""
    if path != "-" and (run := surefoot_run.run_dir_of(path)) is not None:
        return [surefoot_run.read_run_dir(run)]
    with LogSource.open(path) as source:
        kind = detect_format(source.head)
        if kind == CHECKPOINT:
            raise UnreadableInput(f"{path} is a checkpoint, not a log")
        if not source.head and source.read_error:
            raise UnreadableInput(f"{path} cannot be decompressed: {source.read_error}")
        if reason := why_not_a_log(source.head) if kind == console_log.FORMAT else "":
            raise UnreadableInput(f"{path} {reason}")
        result = _read_format(source, kind)
        tables = result if isinstance(result, list) else [result]
        if source.read_error and not any(source.read_error in note for table in tables for note in table.notes):
            note = f"the file could not be read to its end ({source.read_error}): this is what stands before"
            tables = [replace(table, notes=(*table.notes, note)) for table in tables]
        return tables


def detect_format(head: bytes) -> str:
    """The format by the first bytes: checkpoint, tensorboard, wandb, jsonl, csv, or text for everything else."""
    for reader in READERS[:2]:
        if reader.fits(head):
            return reader.FORMAT
    if is_checkpoint_file(head):
        return CHECKPOINT
    if why_not_a_log(head):
        return console_log.FORMAT
    return next((reader.FORMAT for reader in READERS[2:] if reader.fits(head)), console_log.FORMAT)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder contains weights and no log."""
    name = os.fspath(path)
    if name != "-" and Path(name).is_dir():
        return is_checkpoint_folder(name) and not folder_has_log(name)
    if name == "-" or not Path(name).is_file():
        return False
    with LogSource.open(name) as source:
        return detect_format(source.head) == CHECKPOINT


def _read_format(source: LogSource, kind: str) -> LogTable | list[LogTable]:
    reader = next((module for module in READERS if kind == module.FORMAT), None)
    if reader is None:
        return console_log.read(source)
    try:
        return reader.read(source)
    except UnreadableInput:
        if reader in READERS[:2] or source.path == "-":
            raise
        with LogSource.open(source.path) as again:
            try:
                table = console_log.read(again)
            except UnreadableInput:
                table = None
        if table is None or not table.columns:
            raise
        return table

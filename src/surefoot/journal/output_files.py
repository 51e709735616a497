"""Output files named by the user: a file that surefoot did not write is replaced only with --force."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GENERATOR = "surefoot"
"""The marker in every output; without --force an existing file is replaced only if it carries the marker."""
_SIGNATURES = (
    (b"<!doctype html>", b'<meta name="generator" content="surefoot'),
    (b'<!doctype html>\n<html lang="en">', b"<footer>surefoot "),  # versions before the generator tag
    (b"\x89PNG\r\n\x1a\n", b"Software\0surefoot"),
    (b"<?xml", b"<dc:title>surefoot</dc:title>"),
    (b"%PDF-", b"/Creator (surefoot)"),
    (b"\xff\xd8\xff", b"\xff\xfe\x00\x0asurefoot"),
    (b"RIFF", b"XMP \x08\x00\x00\x00surefoot"),
    (b"<!-- surefoot report -->", b""),
    (b'{\n "made_by": "surefoot', b""),
    (b"# Chaos\n\nWritten by `surefoot ", b""),
    (b"# The zoo\n\nWritten by `surefoot ", b""),
)
"""How a file of each format begins, and the marker in its first or last bytes."""
_SCANNED_BYTES = 1 << 16
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))

PathArg = str | os.PathLike[str]


class OutputRefused(ValueError):
    """The output file must not be written; the message says what is there and what to do."""


def is_surefoot_output(path: Path) -> bool:
    """Whether a file carries the marker of an earlier output."""
    with path.open("rb") as file:
        head = file.read(_SCANNED_BYTES)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _SCANNED_BYTES))
        tail = file.read(_SCANNED_BYTES)
    return any(head.startswith(begin) and (marker in head or marker in tail) for begin, marker in _SIGNATURES)


def check_output(
    path: PathArg, *, inputs: Sequence[PathArg] = (), force: bool | None = False, new: bool = False
) -> Path:
    """Return the file to write, links followed, or raise `OutputRefused`.

    `inputs` are the paths the command reads: they are never replaced, not even with `force`. `force=None` is for
    commands without that option. With `new` an earlier output is not replaced either.
    """
    target = _resolved(path)
    try:
        status = os.stat(path)  # of the target of a link, such as /dev/stdout
    except (FileNotFoundError, NotADirectoryError):
        return target
    except OSError as error:
        raise OutputRefused(f"{path} cannot be written: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode) or _is_descriptor(path):
        kind = next((kind for test, kind in _KINDS if test(status.st_mode)), "a device")
        raise OutputRefused(f"{path} is {kind}, which is never replaced. Name a regular file")
    if any(_is_input(status, input_path) for input_path in inputs):
        raise OutputRefused(f"{path} is the input file, which is never replaced. Name another file")
    if new:
        raise OutputRefused(f"{path} already exists; name a new file")
    if status.st_size == 0 or is_surefoot_output(target):
        return target
    if folder := next((input_path for input_path in inputs if _contains(input_path, target)), None):
        raise OutputRefused(f"{path} lies inside the input {folder}. Name another file")
    if not force:
        way_out = "remove it" if force is None else "pass --force to replace it"
        raise OutputRefused(f"{path} already exists and surefoot did not write it. Name another file, or {way_out}")
    return target


@contextmanager
def output_file(
    path: PathArg, *, inputs: Sequence[PathArg] = (), force: bool | None = False, new: bool = False
) -> Iterator[Path]:
    """Yield a draft beside the file and move it into place if the block succeeds: readers never see half a file."""
    target = check_output(path, inputs=inputs, force=force, new=new)
    draft = target.with_name(f".{target.stem[:60]}-{secrets.token_hex(4)}{target.suffix[:60]}")
    try:
        yield draft
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def save_figure(
    figure: Any, path: PathArg, *, inputs: Sequence[PathArg] = (), force: bool | None = False, **options: Any
) -> None:
    """Save a matplotlib figure with surefoot's marker in its metadata."""
    with output_file(path, inputs=inputs, force=force) as draft:
        figure.savefig(draft, **options, **_marker_options(Path(path).suffix.lower()))


def _marker_options(suffix: str) -> dict[str, Any]:
    if suffix == ".png":
        return {"metadata": {"Software": GENERATOR}}
    if suffix in (".svg", ".pdf"):
        return {"metadata": {"Creator": GENERATOR}}
    if suffix in (".jpg", ".jpeg"):
        return {"pil_kwargs": {"comment": GENERATOR.encode()}}
    if suffix == ".webp":
        return {"pil_kwargs": {"xmp": GENERATOR.encode()}}
    return {}


def _resolved(path: PathArg) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise OutputRefused(f"{path} cannot be written: {error}") from None


def _is_descriptor(path: PathArg) -> bool:
    """Whether this is /dev/stdout or the like, which may lead to a regular file that another program is writing."""
    folder = os.path.dirname(os.path.abspath(path))
    return folder in ("/dev", "/dev/fd") or folder.startswith("/proc/")


def _is_input(status: os.stat_result, input_path: PathArg) -> bool:
    """Whether this is an input file, under whatever name; standard input may be a file too."""
    try:
        return os.path.samestat(status, os.fstat(0) if input_path == "-" else os.stat(input_path))
    except (OSError, ValueError):
        return False


def _contains(folder: PathArg, target: Path) -> bool:
    return folder != "-" and os.path.isdir(folder) and target.is_relative_to(os.path.realpath(folder))

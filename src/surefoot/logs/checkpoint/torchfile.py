"""Files of torch.save, read with nothing but `weights_only=True`: no code in them is ever run.

Objects of other kinds than tensors and plain values (settings of a trainer, whole modules) are what `weights_only`
refuses. Their names are known before the file is loaded, and an empty stand-in of ours takes the place of each, so that
the tensors around and in them can be looked at. Nothing that the file names is imported for it, let alone called.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.logs.table import UnreadableInput

_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_PLAIN = frozenset(
    {"set", "frozenset", "slice", "range", "complex", "bytearray", "object", "list", "dict", "tuple", "int", "float"}
    | {"str", "bool", "bytes", "getattr", "type"}
)
_NEVER = frozenset(
    {"os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "runpy", "importlib", "ctypes", "pty", "code"}
    | {"webbrowser", "marshal", "pickle", "_pickle", "commands", "asyncio", "multiprocessing", "threading", "requests"}
)
WAY_OUT = "Save the weights alone (torch.save(model.state_dict(), ...) or safetensors), where you trust the file"


class Closed:
    """Stands for an object that was not loaded; keeps the tensors that would have gone into it."""

    held: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Closed:
        self = super().__new__(cls)
        self.held = [*args, *kwargs.values()]
        return self

    def __setstate__(self, state: Any) -> None:
        self.held.append(state)


class ClosedTable:
    """Stands for a kind of dictionary; what the file puts into it is kept."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict()


_IN_ARCHIVES = (b"data.pkl", b"/constants.pkl", b"/.format_version", b"/.storage_alignment", b"/byteorder")
"""Names of files that only torch puts into archives; one of them comes first."""


def fits(head: bytes) -> bool:
    """A zip archive with a pickle in it, an old file of torch, or any other pickle; also an archive of tar with one."""
    if head.startswith(b"PK\x03\x04"):
        return any(name in head[:4096] for name in _IN_ARCHIVES)
    if head[257:262] == b"ustar" or head.startswith(b"storages\0"):
        return any(name in head[:4096] for name in (b"storages", b"sys_info", b"tensors"))
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def load(path: Path) -> tuple[Any, list[str]]:
    """The object in the file, and what to say about it."""
    try:
        import torch
    except ImportError:
        raise UnreadableInput(
            f"{path} is a checkpoint of torch.save, and torch is not installed here. Install it (pip install torch; the"
            " build for the CPU is enough), or save the weights as safetensors, which are read without it"
        ) from None
    if _without_directory(path):
        raise UnreadableInput(_cut_off(path))
    refused, notes = _refused(torch, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _loaded(torch, path, refused), notes
        except UnreadableInput:
            raise
        except MemoryError:
            raise UnreadableInput(f"{path} does not fit into memory. Look at it on a larger machine") from None
        except Exception as error:
            raise UnreadableInput(_told(path, error)) from None


def load_plain(path: Path) -> Any:
    """The object in the file as `weights_only=True` gives it: with nothing left out, or not at all."""
    try:
        import torch
    except ImportError:
        raise UnreadableInput(f"{path} is to be read with torch, which is not installed here: pip install torch") from None
    names, _ = _refused(torch, path)
    if names:
        raise UnreadableInput(
            f"{path} holds objects that are not loaded, as a pickle may run any code: {', '.join(names[:8])}. {WAY_OUT}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _attempt(torch, path, [])
        except OSError as error:
            raise UnreadableInput(f"{path} cannot be read: {error.strerror or error}") from None
        except Exception as error:
            raise UnreadableInput(_told(path, error)) from None


def _refused(torch: Any, path: Path) -> tuple[list[str], list[str]]:
    """Names of what `weights_only` would not load, none of them of a kind that no checkpoint needs."""
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # an old or a damaged file: loading tells what is wrong with it
        return [], []
    for name in names:
        module, _, word = name.rpartition(".")
        if module.split(".")[0] in _NEVER or (module in ("builtins", "__builtin__") and word not in _PLAIN):
            raise UnreadableInput(
                f"{path} wants to call {name} while it is loaded. No checkpoint needs that, and it was not done: a"
                f" pickle may run any code. Do not load this file with weights_only=False. {WAY_OUT}"
            )
    if not names:
        return [], []
    return names, [f"objects of these kinds were not loaded, as a pickle may run any code: {', '.join(names[:8])}"]


def _loaded(torch: Any, path: Path, refused: list[str]) -> Any:
    try:
        return _attempt(torch, path, [(_stand_in(name), name) for name in refused])
    except Exception as error:
        # Told only now: one of the kinds is a dictionary, though its name does not say so.
        if not refused or "SETITEM" not in str(error):
            raise
    tables = [(Closed if name.startswith("numpy.") else ClosedTable, name) for name in refused]
    return _attempt(torch, path, tables)


def _attempt(torch: Any, path: Path, stand_ins: list[tuple[Callable[..., Any], str]]) -> Any:
    with torch.serialization.safe_globals(stand_ins):
        try:
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
        return torch.load(str(path), map_location="cpu", weights_only=True)


def _stand_in(name: str) -> Callable[..., Any]:
    word = name.rpartition(".")[2].lower()
    return ClosedTable if any(part in word for part in ("dict", "counter", "munch", "box")) else Closed


def _told(path: Path, error: Exception) -> str:
    words = str(error)
    if wanted := re.search(r"GLOBAL (\S+)|reduce for unrecognized function (.+?)(?: which|$)", words):
        name = (wanted[1] or wanted[2]).rstrip(".")
        return f"{path} wants to import {name}, which was not done: a pickle may run any code. {WAY_OUT}"
    if "TorchScript" in words or "torchscript" in words:
        return f"{path} is a program of TorchScript, not a checkpoint. {WAY_OUT}"
    if "central directory" in words or "zip archive" in words or "PytorchStreamReader" in words:
        return _cut_off(path)
    if "tar" in words and "weights_only" in words:
        return f"{path} is in the tar format that torch gave up in 2017, which is not read safely. {WAY_OUT}"
    first = re.split(r"[\n.] ?", re.sub(r"\x1b\[[0-9;]*m", "", words), maxsplit=1)[0][:200] or "it ends too early"
    return f"{path} cannot be read as a checkpoint: {type(error).__name__}, {first}. It is cut off, or no checkpoint"


def _without_directory(path: Path) -> bool:
    """Whether a file begins as an archive and does not end as one."""
    with path.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            return False
    try:
        return not zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True


def _cut_off(path: Path) -> str:
    return (
        f"{path} is cut off or damaged: its archive has no whole directory. Was the disk full, or the job killed, while"
        " it was saved? Take an earlier checkpoint"
    )


def checksums(path: Path, progress: Callable[[int], None]) -> tuple[int, int]:
    """Entries of the archive whose checksum does not hold, and entries in all; torch itself does not look at them."""
    wrong = total = 0
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    continue  # torch compresses nothing
                total += 1
                try:
                    with archive.open(entry) as stream:
                        while part := stream.read(1 << 22):
                            progress(len(part))
                except zipfile.BadZipFile:
                    wrong += 1
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, ValueError):
        return 0, 0
    return wrong, total

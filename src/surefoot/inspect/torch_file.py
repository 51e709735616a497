"""torch.save files, read with nothing but `weights_only=True`: no code in them is ever run.

`weights_only` refuses objects other than tensors and plain values (trainer settings, whole modules). Their names are
known before the file is loaded, and an empty stand-in replaces each of them, so that the tensors around and inside them
can be read. Nothing that the file names is imported for this, let alone called.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.logs.log_diagnosis import UnreadableInput

_SAFE_BUILTINS = frozenset(
    {"set", "frozenset", "slice", "range", "complex", "bytearray", "object", "list", "dict", "tuple", "int", "float"}
    | {"str", "bool", "bytes", "getattr", "type"}
)
_DANGEROUS_MODULES = frozenset(
    {"os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "runpy", "importlib", "ctypes", "pty", "code"}
    | {"webbrowser", "marshal", "pickle", "_pickle", "commands", "asyncio", "multiprocessing", "threading", "requests"}
)
WAY_OUT = "If you trust the file, save only the weights (torch.save(model.state_dict(), ...) or safetensors)"


class UnloadedObject:
    """Stand-in for an object that was not loaded; keeps the tensors that would have gone into it."""

    contents: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> UnloadedObject:
        self = super().__new__(cls)
        self.contents = [*args, *kwargs.values()]
        return self

    def __setstate__(self, state: Any) -> None:
        self.contents.append(state)


class UnloadedDict:
    """Stand-in for a dict subclass; keeps the items."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict()


_TORCH_ARCHIVE_NAMES = (b"data.pkl", b"/constants.pkl", b"/.format_version", b"/.storage_alignment", b"/byteorder")
"""File names that only torch writes into archives; one of them comes first."""


def is_torch_file(head: bytes) -> bool:
    """Whether the bytes start a torch zip archive, an old torch file, a torch tar archive, or any other pickle."""
    if head.startswith(b"PK\x03\x04"):
        return any(name in head[:4096] for name in _TORCH_ARCHIVE_NAMES)
    if head[257:262] == b"ustar" or head.startswith(b"storages\0"):
        return any(name in head[:4096] for name in (b"storages", b"sys_info", b"tensors"))
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def load_tolerant(path: Path) -> tuple[Any, list[str]]:
    """Load a file, with stand-ins for objects that `weights_only` refuses; the object, and notes about stand-ins."""
    try:
        import torch
    except ImportError:
        raise UnreadableInput(
            f"{path} is a torch.save checkpoint, and torch is not installed. Install it (pip install torch;"
            " the CPU build is enough), or save the weights as safetensors, which are read without it"
        ) from None
    if _has_no_directory(path):
        raise UnreadableInput(_cut_off_message(path))
    refused, notes = _refused_names(torch, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _load_with_stand_ins(torch, path, refused), notes
        except UnreadableInput:
            raise
        except MemoryError:
            raise UnreadableInput(f"{path} does not fit into memory. Inspect it on a larger machine") from None
        except Exception as error:
            raise UnreadableInput(_explain(path, error)) from None


def load_strict(path: Path) -> Any:
    """Load a file with `weights_only=True` and no stand-ins; raises if that would leave anything out."""
    try:
        import torch
    except ImportError:
        raise UnreadableInput(
            f"{path} can only be read with torch, which is not installed: pip install torch"
        ) from None
    names, _ = _refused_names(torch, path)
    if names:
        raise UnreadableInput(
            f"{path} holds objects that are not loaded, as a pickle may run any code: {', '.join(names[:8])}. {WAY_OUT}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _load(torch, path, [])
        except OSError as error:
            raise UnreadableInput(f"{path} cannot be read: {error.strerror or error}") from None
        except Exception as error:
            raise UnreadableInput(_explain(path, error)) from None


def _refused_names(torch: Any, path: Path) -> tuple[list[str], list[str]]:
    """Globals that `weights_only` refuses, and a note about them; raises for globals that no checkpoint needs."""
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # an old or damaged file: loading it says what is wrong
        return [], []
    for name in names:
        module, _, attribute = name.rpartition(".")
        builtin = module in ("builtins", "__builtin__")
        if module.split(".")[0] in _DANGEROUS_MODULES or (builtin and attribute not in _SAFE_BUILTINS):
            raise UnreadableInput(
                f"{path} would call {name} when loaded. No checkpoint needs that; it was not called, as a pickle may"
                f" run any code. Do not load this file with weights_only=False. {WAY_OUT}"
            )
    if not names:
        return [], []
    return names, [f"objects of these types were not loaded, as a pickle may run any code: {', '.join(names[:8])}"]


def _load_with_stand_ins(torch: Any, path: Path, refused: list[str]) -> Any:
    try:
        return _load(torch, path, [(_stand_in(name), name) for name in refused])
    except Exception as error:
        # Only this error reveals that one of the types is a dict whose name does not say so.
        if not refused or "SETITEM" not in str(error):
            raise
    stand_ins = [(UnloadedObject if name.startswith("numpy.") else UnloadedDict, name) for name in refused]
    return _load(torch, path, stand_ins)


def _load(torch: Any, path: Path, stand_ins: list[tuple[Callable[..., Any], str]]) -> Any:
    with torch.serialization.safe_globals(stand_ins):
        try:
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
        return torch.load(str(path), map_location="cpu", weights_only=True)


def _stand_in(name: str) -> Callable[..., Any]:
    class_name = name.rpartition(".")[2].lower()
    return UnloadedDict if any(part in class_name for part in ("dict", "counter", "munch", "box")) else UnloadedObject


def _explain(path: Path, error: Exception) -> str:
    message = str(error)
    if wanted := re.search(r"GLOBAL (\S+)|reduce for unrecognized function (.+?)(?: which|$)", message):
        name = (wanted[1] or wanted[2]).rstrip(".")
        return f"{path} would import {name}; it was not loaded, as a pickle may run any code. {WAY_OUT}"
    if "TorchScript" in message or "torchscript" in message:
        return f"{path} is a TorchScript program, not a checkpoint. {WAY_OUT}"
    if "central directory" in message or "zip archive" in message or "PytorchStreamReader" in message:
        return _cut_off_message(path)
    if "tar" in message and "weights_only" in message:
        return f"{path} uses the tar format that torch dropped in 2017, which cannot be read safely. {WAY_OUT}"
    first = re.split(r"[\n.] ?", re.sub(r"\x1b\[[0-9;]*m", "", message), maxsplit=1)[0][:200] or "it ends too early"
    return f"{path} cannot be read as a checkpoint: {type(error).__name__}, {first}. It is cut off, or not a checkpoint"


def _has_no_directory(path: Path) -> bool:
    """Whether a file starts as a zip archive but has no central directory."""
    with path.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            return False
    try:
        return not zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True


def _cut_off_message(path: Path) -> str:
    return (
        f"{path} is cut off or damaged: its zip archive has no complete directory. The disk may have been full, or the"
        " job killed, during the save. Use an earlier checkpoint"
    )


def verify_checksums(path: Path, progress: Callable[[int], None]) -> tuple[int, int]:
    """Archive entries with a wrong checksum, and entries in total; torch itself does not verify them."""
    wrong = total = 0
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    continue  # torch does not compress
                total += 1
                try:
                    with archive.open(entry) as stream:
                        while chunk := stream.read(1 << 22):
                            progress(len(chunk))
                except zipfile.BadZipFile:
                    wrong += 1
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, ValueError):
        return 0, 0
    return wrong, total

"""A checkpoint looked at tensor by tensor: NaN and Inf, absurd sizes, layers that do nothing, bad moments.

safetensors are read with numpy alone, files of torch.save with `weights_only=True` and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.logs.answer import LogDiagnosis, PathLike
from surefoot.logs.checkpoint import folder as folders
from surefoot.logs.checkpoint import safefile, structure, torchfile
from surefoot.logs.checkpoint.held import Contents
from surefoot.logs.checkpoint.looking import Progress, looked_at
from surefoot.logs.table import UnreadableInput

__all__ = ["diagnose_checkpoint", "fits", "fits_folder", "log_beside", "weights_in"]


def fits(head: bytes) -> bool:
    """Whether a file is a checkpoint: safetensors, a file of torch.save, or another pickle, which may hold weights."""
    return safefile.fits(head) or torchfile.fits(head)


def fits_folder(path: PathLike) -> bool:
    """Whether a folder is a checkpoint: weights lie in it."""
    return folders.is_checkpoint(Path(path))


def log_beside(path: PathLike) -> bool:
    """Whether a log lies beside the weights, which tells more than they do."""
    return folders.has_log(Path(path))


def weights_in(path: PathLike) -> Path | None:
    """The first file of weights that lies in a folder itself."""
    return folders.weights(Path(path))


def diagnose_checkpoint(path: PathLike, progress: Progress | None = None) -> LogDiagnosis:
    """What is wrong with a checkpoint file or folder; raises `Unreadable` for what cannot or must not be loaded.

    `progress` is called with the bytes looked at so far and in all.
    """
    place = Path(path)
    try:
        contents = folders.read(place) if place.is_dir() else _read(place)
        return looked_at(place, contents, progress)
    except OSError as error:
        raise UnreadableInput(f"{place} cannot be read: {error.strerror or error}") from None


def _read(path: Path) -> Contents:
    with path.open("rb") as stream:
        head = stream.read(1 << 16)
    if not head:
        raise UnreadableInput(f"{path} is empty: the save was broken off. Take an earlier checkpoint")
    if safefile.fits(head):
        return safefile.read(path)
    if not torchfile.fits(head):
        raise UnreadableInput(f"{path} is neither a safetensors file nor one of torch.save")
    loaded, notes = torchfile.load(path)
    contents = structure.sorted_out(loaded)
    contents.notes += notes
    return contents

"""What can go wrong with a checkpoint, in words."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint: which file of it, and what."""

    file: str
    what: str
    foreign: bool = False
    """Nothing is damaged: a newer surefoot wrote it, and we must leave it alone."""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


class Damage(ValueError):
    """A file of a checkpoint is not what was written."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class SaveFailed(RuntimeError):
    """A checkpoint, or its mark, could not be written; those that stood there before are as they were."""

    def __init__(self, reason: str, *, kind: str = "other") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        """full, read-only, permission, i/o, hangs, damaged or other."""


class NothingWhole(RuntimeError):
    """There are checkpoints, and none of them may be loaded."""

    def __init__(self, root: Path, each: list[str]) -> None:
        self.each = each
        listed = "".join(f"\n  {one}" for one in each)
        super().__init__(
            f"{root} holds {len(each)} checkpoint{'s' * (len(each) != 1)} and none of them is whole:{listed}\n"
            "Bring one back from a copy, or move the folder away to begin anew."
        )


class CheckpointWarning(UserWarning):
    """A newer checkpoint was passed over."""


_KINDS = {
    errno.ENOSPC: ("full", "the disk is full. Make room, or keep fewer checkpoints"),
    errno.EDQUOT: ("full", "your share of the disk is used up. Make room, or keep fewer checkpoints"),
    errno.EFBIG: ("full", "a file of this size is not allowed here"),
    errno.EROFS: ("read-only", "the disk can only be read"),
    errno.EACCES: ("permission", "writing is not permitted here"),
    errno.EPERM: ("permission", "writing is not permitted here"),
    errno.EIO: ("i/o", "the disk reports an error of its own (I/O error)"),
}


def not_saved(step: int) -> str:
    return f"the checkpoint of step {step} was not saved"


def failed(what: str, error: OSError) -> SaveFailed:
    """The words for an error of the system, after those for what came of it."""
    kind, words = _KINDS.get(error.errno or 0, ("other", error.strerror or str(error) or type(error).__name__))
    where = f" ({error.filename})" if error.filename else ""
    return SaveFailed(f"{what}: {words}{where}", kind=kind)

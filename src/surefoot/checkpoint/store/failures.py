"""What can go wrong with a checkpoint: damaged files, failed saves, and nothing left to load."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with a checkpoint: the file, and what is wrong with it."""

    file: str
    what: str
    newer_version: bool = False
    """Not damage: a newer surefoot wrote the file, and this version must leave it alone."""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


class DamagedFile(ValueError):
    """A file of a checkpoint is not what was written."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class SaveFailed(RuntimeError):
    """A checkpoint or its health mark could not be written; existing checkpoints are unchanged."""

    def __init__(self, reason: str, *, kind: str = "other") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        """full, read-only, permission, i/o, hangs, damaged or other."""


class NoUsableCheckpoint(RuntimeError):
    """Checkpoints exist, but none of them can be loaded."""

    def __init__(self, root: Path, problems: list[str]) -> None:
        self.problems = problems
        listed = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(
            f"{root} holds {len(problems)} checkpoint{'s' * (len(problems) != 1)}, and none is complete:{listed}\n"
            "Restore one from a backup, or move the folder away to start over."
        )


class CheckpointWarning(UserWarning):
    """A newer checkpoint was skipped."""


NOT_SAVED = "the checkpoint of step {} was not saved"
_ERRORS = {
    errno.ENOSPC: ("full", "the disk is full. Free some space, or keep fewer checkpoints"),
    errno.EDQUOT: ("full", "your disk quota is used up. Free some space, or keep fewer checkpoints"),
    errno.EFBIG: ("full", "the file system does not allow a file of this size"),
    errno.EROFS: ("read-only", "the file system is read-only"),
    errno.EACCES: ("permission", "no permission to write here"),
    errno.EPERM: ("permission", "no permission to write here"),
    errno.EIO: ("i/o", "the disk reports an I/O error"),
}


def save_failed(what: str, error: OSError) -> SaveFailed:
    """The SaveFailed for an OSError; its message begins with `what`."""
    kind, reason = _ERRORS.get(error.errno or 0, ("other", error.strerror or str(error) or type(error).__name__))
    path = f" ({error.filename})" if error.filename else ""
    return SaveFailed(f"{what}: {reason}{path}", kind=kind)

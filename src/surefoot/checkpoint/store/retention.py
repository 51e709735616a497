"""Which checkpoints are kept, and the removal of the others once enough complete ones are certain to remain."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from surefoot.checkpoint.store.files import Files
from surefoot.checkpoint.store.folders import remove_checkpoint
from surefoot.checkpoint.store.stored_checkpoint import StoredCheckpoint, fingerprint, verify_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rules for what stays; a checkpoint that no rule selects is removed.

    Order is always that of training (step, then attempt). Time can only add to what stays, so a wrong clock costs disk
    space and nothing else.
    """

    last: int = 3
    """How many of the newest regular checkpoints stay."""
    emergency: int = 2
    """How many of the newest emergency checkpoints stay, in addition to the regular ones."""
    best: str = ""
    """A metric in `about["metrics"]`; the best checkpoint by it stays. Without one, the newest of kind "best" stays."""
    mode: Literal["min", "max"] = "min"
    apart: float = 3600.0
    """Seconds of training between checkpoints that stay as a history; 0 for no history."""
    spaced: int = 24
    """The most that stay as a history, the newest ones: a month of one per hour would fill any disk."""
    least: int = 2
    """Never fewer complete checkpoints than this, whatever the other rules say."""

    def __post_init__(self) -> None:
        if self.last < 1 or self.least < 2 or min(self.emergency, self.spaced) < 0 or self.mode not in ("min", "max"):
            raise ValueError(
                f"Retention needs last >= 1, least >= 2, emergency >= 0, spaced >= 0 and mode min or max; got {self}"
            )


def removable(
    checkpoints: Sequence[StoredCheckpoint], keep: Retention, *, protect: Collection[str] = ()
) -> list[StoredCheckpoint]:
    """Checkpoints that may be removed, in order of removal: damaged and suspect ones first, then the oldest.

    A decision over plain values; does not touch the disk.
    """
    ordered = sorted(checkpoints, key=lambda c: c.order)
    intact = [c for c in ordered if not c.problems]
    stay = {c.name for c in chain(*_selected(intact, keep))} | set(protect)
    for checkpoint in sorted(intact, key=lambda c: (c.health != "suspect", c.order), reverse=True):
        if len(stay & {c.name for c in intact}) >= keep.least:
            break
        stay.add(checkpoint.name)
    staying = [c for c in intact if c.name in stay]
    # Added last, so that a clock never causes the removal of something that would stay without one.
    stay |= {c.name for c in _spaced(intact, keep)}
    gone = [c for c in intact if c.name not in stay]
    for checkpoint in ordered:
        # A damaged one is evidence until enough newer ones exist; what a newer surefoot wrote is not ours to remove.
        newer = sum(other.order > checkpoint.order for other in staying)
        damaged = checkpoint.problems and not checkpoint.newer_version
        if damaged and checkpoint.name not in stay and newer >= keep.last:
            gone.append(checkpoint)
    return sorted(gone, key=lambda c: (not c.problems, c.health != "suspect", c.order))


def _selected(intact: list[StoredCheckpoint], keep: Retention) -> list[Sequence[StoredCheckpoint]]:
    """What each rule that needs no clock selects; `intact` is in the order of training."""
    trusted = [c for c in intact if c.health != "suspect"]
    regular = [c for c in trusted if c.kind != "emergency"]
    healthy = [c for c in trusted if c.health == "healthy"]
    emergency = [c for c in intact if c.kind == "emergency"]
    # Suspect ones stay only until something newer proved healthy, and never take the place of a better one.
    floor = healthy[-1].order if healthy else (-1, -1, -1)
    suspect = [c for c in intact if c.health == "suspect" and c.order > floor]
    return [
        regular[-keep.last :],
        emergency[len(emergency) - min(keep.emergency, len(emergency)) :],
        _best(trusted, keep),
        healthy[-1:],
        suspect[-keep.last :],
    ]


def _best(trusted: list[StoredCheckpoint], keep: Retention) -> Sequence[StoredCheckpoint]:
    if not keep.best:
        return [c for c in trusted if c.kind == "best"][-1:]
    scored = [(value, c) for c in trusted if (value := _metric(c, keep.best)) is not None]
    if not scored:
        return []
    sign = 1.0 if keep.mode == "min" else -1.0
    # Of equally good ones the first: nothing has been better since.
    return [min(scored, key=lambda pair: (sign * pair[0], pair[1].order))[1]]


def _metric(checkpoint: StoredCheckpoint, name: str) -> float | None:
    metrics = checkpoint.about.get("metrics")
    return _number(metrics.get(name)) if isinstance(metrics, dict) else None


def _spaced(intact: list[StoredCheckpoint], keep: Retention) -> Sequence[StoredCheckpoint]:
    """The oldest, then each one at least `apart` seconds after the one chosen before it, or earlier by the clock."""
    if keep.apart <= 0 or not keep.spaced:
        return []
    chosen: list[StoredCheckpoint] = []
    last: float | None = None
    for checkpoint in intact:
        if checkpoint.health == "suspect" or checkpoint.kind == "emergency":
            continue
        now = _number(checkpoint.about.get("seconds"))
        now = _number(checkpoint.about.get("time")) if now is None else now
        if now is not None and (last is None or not 0 <= now - last < keep.apart):
            chosen.append(checkpoint)
            last = now
    return chosen[-keep.spaced :]


def _number(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # pyright: ignore[reportArgumentType]


class Pruner:
    """Removes old checkpoints; remembers which ones were read in full, so that each is read once, not at every save."""

    def __init__(self, keep: Retention) -> None:
        self._keep = keep
        self._verified: dict[str, object] = {}

    def mark_verified(self, checkpoint: StoredCheckpoint) -> None:
        """Every byte of it was just compared and is right."""
        self._verified[checkpoint.name] = fingerprint(checkpoint)

    def prune(self, checkpoints: list[StoredCheckpoint], newest: StoredCheckpoint, files: Files) -> list[str]:
        """Remove what no rule keeps, and return the removed names; `checkpoints` are sorted newest first."""
        gone = removable(checkpoints, self._keep, protect={newest.name})
        must_stay = self._must_stay(checkpoints, gone, files) if gone else set[str]()
        removed: list[str] = []
        for checkpoint in gone:
            if checkpoint.name not in must_stay:
                remove_checkpoint(checkpoint.folder, files)
                self._verified.pop(checkpoint.name, None)
                removed.append(checkpoint.name)
        return removed

    def _must_stay(self, checkpoints: list[StoredCheckpoint], gone: list[StoredCheckpoint], files: Files) -> set[str]:
        """Those to be removed that must stay because too few of the others are complete."""
        leaving = {c.name for c in gone}
        complete = 0
        must_stay: set[str] = set()
        for checkpoint in sorted(checkpoints, key=lambda c: c.name in leaving):
            if complete >= self._keep.least:
                break
            if self._is_complete(checkpoint, files):
                complete += 1
                must_stay |= {checkpoint.name} & leaving
        return must_stay

    def _is_complete(self, checkpoint: StoredCheckpoint, files: Files) -> bool:
        """Whether every byte is right: read now, unless verified before and no file was touched since."""
        now = fingerprint(checkpoint)
        if now is None or checkpoint.problems:
            return False
        if self._verified.get(checkpoint.name) != now:
            if verify_files(checkpoint, files).problems:
                return False
            self._verified[checkpoint.name] = now
        return True

"""Which checkpoints may go. A decision over plain values: nothing here touches the disk."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from surefoot.checkpoint.store.entry import StoredCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays; a checkpoint that no rule names goes.

    Order is always that of training (step, then attempt). Time only ever adds to what stays, so a clock set back or
    forward costs some room on the disk and nothing else.
    """

    last: int = 3
    """So many of the regular ones."""
    emergency: int = 2
    """So many of those saved at trouble, beside the regular ones."""
    best: str = ""
    """The name of a metric in `about["metrics"]`; the best by it stays. Without one the newest of kind "best" does."""
    mode: Literal["min", "max"] = "min"
    apart: float = 3600.0
    """Seconds of training between those that stay for their time; 0 for none."""
    spaced: int = 24
    """The most that stay for their time: the newest so many. A month of one an hour would fill any disk."""
    least: int = 2
    """Never fewer whole ones than this, whatever the other rules say."""

    def __post_init__(self) -> None:
        if self.last < 1 or self.least < 2 or min(self.emergency, self.spaced) < 0 or self.mode not in ("min", "max"):
            raise ValueError(
                f"a retention keeps at least the last one and two in all, and its mode is min or max: got {self}"
            )


def going(
    all_kept: Sequence[StoredCheckpoint], keep: Retention, *, protect: Collection[str] = ()
) -> list[StoredCheckpoint]:
    """Those that may be removed, in the order to do it: damaged and suspect ones first, then the oldest."""
    ordered = sorted(all_kept, key=lambda kept: kept.order)
    sound = [kept for kept in ordered if not kept.wrong]
    stay = {kept.name for kept in chain(*_reasons(sound, keep))} | set(protect)
    for kept in sorted(sound, key=lambda kept: (kept.health != "suspect", kept.order), reverse=True):
        if len(stay & {one.name for one in sound}) >= keep.least:
            break
        stay.add(kept.name)
    staying = [kept for kept in sound if kept.name in stay]
    # Only now, so that nothing goes because of a clock which would have stayed without one.
    stay |= {kept.name for kept in _spaced(sound, keep)}
    gone = [kept for kept in sound if kept.name not in stay]
    for kept in ordered:
        # A damaged one is evidence until enough newer ones stand; what a newer surefoot wrote is not ours to remove.
        newer = sum(other.order > kept.order for other in staying)
        if kept.wrong and not kept.foreign and kept.name not in stay and newer >= keep.last:
            gone.append(kept)
    return sorted(gone, key=lambda kept: (not kept.wrong, kept.health != "suspect", kept.order))


def _reasons(sound: list[StoredCheckpoint], keep: Retention) -> list[Sequence[StoredCheckpoint]]:
    """The choice of each rule that asks no clock, from checkpoints in the order of training."""
    trusted = [kept for kept in sound if kept.health != "suspect"]
    regular = [kept for kept in trusted if kept.kind != "emergency"]
    healthy = [kept for kept in trusted if kept.health == "healthy"]
    emergency = [kept for kept in sound if kept.kind == "emergency"]
    # Suspect ones stay only while nothing newer has proved healthy, and never take the place of a better one.
    floor = healthy[-1].order if healthy else (-1, -1, -1)
    suspect = [kept for kept in sound if kept.health == "suspect" and kept.order > floor]
    return [
        regular[-keep.last :],
        emergency[len(emergency) - min(keep.emergency, len(emergency)) :],
        _best(trusted, keep),
        healthy[-1:],
        suspect[-keep.last :],
    ]


def _best(trusted: list[StoredCheckpoint], keep: Retention) -> Sequence[StoredCheckpoint]:
    if not keep.best:
        return [kept for kept in trusted if kept.kind == "best"][-1:]
    scored = [(value, kept) for kept in trusted if (value := _metric(kept, keep.best)) is not None]
    if not scored:
        return []
    sign = 1.0 if keep.mode == "min" else -1.0
    # Of equally good ones the first: it was there before, and nothing has been better since.
    return [min(scored, key=lambda pair: (sign * pair[0], pair[1].order))[1]]


def _metric(kept: StoredCheckpoint, name: str) -> float | None:
    metrics = kept.about.get("metrics")
    return _number(metrics.get(name)) if isinstance(metrics, dict) else None


def _spaced(sound: list[StoredCheckpoint], keep: Retention) -> Sequence[StoredCheckpoint]:
    """The oldest, and from there on each that comes long enough after the one before, or before it by the clock."""
    if keep.apart <= 0 or not keep.spaced:
        return []
    chosen: list[StoredCheckpoint] = []
    last: float | None = None
    for kept in sound:
        if kept.health == "suspect" or kept.kind == "emergency":
            continue
        now = _number(kept.about.get("seconds"))
        now = _number(kept.about.get("time")) if now is None else now
        if now is not None and (last is None or not 0 <= now - last < keep.apart):
            chosen.append(kept)
            last = now
    return chosen[-keep.spaced :]


def _number(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # pyright: ignore[reportArgumentType]

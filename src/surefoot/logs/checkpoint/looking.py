"""The answer about a checkpoint: what every look at every tensor comes to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.logs.answer import LogDiagnosis, RunHealth
from surefoot.logs.checkpoint import optimizer, torchfile, weights
from surefoot.logs.checkpoint.figures import Figures, figures
from surefoot.logs.checkpoint.finding import Finding, finding, listed
from surefoot.logs.checkpoint.held import Contents, Held
from surefoot.logs.checkpoint.roles import Role, role_of
from surefoot.logs.checkpoint.weights import Weight
from surefoot.records import Cause, Pattern

Progress = Callable[[int, int], None]


def looked_at(path: Path, contents: Contents, progress: Progress | None) -> LogDiagnosis:
    """Every tensor measured once, every check asked, the gravest told first."""
    count = _Count(contents, path, progress)
    looked = [Weight(held, role_of(held), count.figures(held)) for held in contents.weights]
    measured: optimizer.Measured = [
        (moments, {name: count.figures(held) for name, held in moments.tensors.items()}) for moments in contents.moments
    ]
    if not looked and not measured:
        return LogDiagnosis(
            verdict=RunHealth.UNKNOWN,
            sentence="No tensor of floating-point numbers was found, so there is nothing to judge by.",
            last_step=contents.step,
            source=_source(path, contents, looked),
            notes=tuple(contents.notes),
        )
    optimizer.name_moments(contents)
    optimizer.counters(contents)
    if contents.step is None and contents.epoch is not None:
        contents.step = contents.epoch
        contents.notes.append(f"no step is stored; {contents.epoch} is the epoch")
    found = [_damaged(path, contents, count)]
    found += [check(looked) for check in weights.CHECKS]
    found.append(weights.at_the_start(looked, contents.counters))
    found += [check(contents, measured) for check in optimizer.CHECKS]
    found.append(_stored_loss(contents))
    troubles = sorted((one for one in found if one), key=lambda one: one.state is not RunHealth.FAILED)
    notes = [*contents.notes, *_remarks(looked)]
    if troubles:
        notes = [f"also: {one.sentence}" for one in troubles[1:]] + notes
    return LogDiagnosis(
        verdict=troubles[0].state if troubles else RunHealth.HEALTHY,
        pattern=troubles[0].pattern if troubles else Pattern.NONE,
        sentence=troubles[0].sentence if troubles else _well(looked, measured),
        last_step=contents.step,
        causes=tuple(one.named for one in troubles),
        source=_source(path, contents, looked),
        notes=tuple(dict.fromkeys(notes)),
    )


class _Count:
    """Bytes looked at so far, handed on to whoever waits."""

    def __init__(self, contents: Contents, path: Path, progress: Progress | None) -> None:
        self._archive = path.stat().st_size if contents.format == "torch" and path.is_file() else 0
        held = sum(one.bytes for one in contents.weights)
        held += sum(one.bytes for moments in contents.moments for one in moments.tensors.values())
        self._total = held + self._archive
        self._done = 0
        self._progress = progress

    def __call__(self, size: int) -> None:
        self._done = min(self._done + size, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def figures(self, held: Held) -> Figures:
        found = figures(held)
        self(held.bytes)
        return found


def _damaged(path: Path, contents: Contents, count: _Count) -> Finding | None:
    """Files that are missing or whose checksums do not hold; a flipped bit shows in nothing else."""
    told = list(contents.damage)
    if contents.format == "torch":
        wrong, total = torchfile.checksums(path, count)
        if 0 < wrong < total:
            told.append(
                f"{wrong:,} of {total:,} parts of the file do not bear their checksum: bits have changed since the save"
            )
        elif wrong:
            contents.notes.append("the file was saved without checksums, so a changed bit cannot be told")
    if not told:
        return None
    return finding(
        RunHealth.FAILED,
        f"The checkpoint is damaged: {told[0]}.",
        Cause.WEIGHTS_DAMAGED,
        confidence=0.95,
        evidence=told,
        advice=["Copy or download it again, and compare.", "If this is the original, take an earlier checkpoint."],
    )


def _stored_loss(contents: Contents) -> Finding | None:
    names = [name for name, value in contents.losses.items() if math.isnan(value)]
    if not names:
        return None
    return finding(
        RunHealth.WARNING,
        f"The checkpoint says of itself that {names[0]} was NaN when it was saved.",
        Cause.UNKNOWN,
        confidence=0.6,
        advice=["Take an earlier checkpoint, and look at the log of the run: surefoot diagnose LOG."],
        pattern=Pattern.NONFINITE,
    )


def _well(looked: list[Weight], measured: optimizer.Measured) -> str:
    numbers = sum(one.figures.count for one in looked) + sum(f.count for _, all_ in measured for f in all_.values())
    tensors = len(looked) + sum(len(all_) for _, all_ in measured)
    beside = ", and so is the optimizer's state" if looked and measured else ""
    return f"Nothing is wrong with the {tensors:,} tensors looked at: all {numbers:,} numbers are sound{beside}."


def _remarks(looked: list[Weight]) -> list[str]:
    """What is worth knowing and no trouble."""
    told = [_summary(looked)] if looked else []
    dtypes = Counter(one.held.dtype for one in looked if one.role is not Role.BUFFER)
    if len(dtypes) > 1:
        told.append("kinds of number: " + ", ".join(f"{count} tensors {name}" for name, count in dtypes.most_common()))
    rows = [one for one in looked if one.role is Role.EMBEDDING and one.figures.empty_rows]
    told += [
        f"{one.name}: {one.figures.empty_rows:,} of {one.figures.rows:,} rows are zero (padding, unused entries)"
        for one in rows[:3]
    ]
    masks = [one.name for one in looked if one.figures.masks]
    if masks:
        told.append(f"masks, whose -Inf is meant: {listed(masks)}")
    return told


def _trained(looked: list[Weight]) -> list[Weight]:
    return [one for one in looked if one.role not in (Role.BUFFER, Role.MEASURED) and not one.figures.masks]


def _summary(looked: list[Weight]) -> str:
    trained = _trained(looked)
    largest = max(trained or looked, key=lambda one: one.figures.norm)
    size = sum(one.held.bytes for one in looked)
    return (
        f"{len(looked):,} tensors, {sum(one.held.count for one in trained):,} parameters, {size / 1e6:,.1f} MB;"
        f" the largest norm is {largest.figures.norm:.4g} in {largest.name}"
    )


def _source(path: Path, contents: Contents, looked: list[Weight]) -> dict[str, Any]:
    trained = _trained(looked)
    largest = max(trained, key=lambda one: one.figures.norm, default=None)
    return {
        "path": str(path),
        "format": contents.format,
        "points": len(looked),
        "columns": {},
        "skipped": dict(contents.skipped),
        "tensors": len(looked),
        "parameters": sum(one.held.count for one in trained),
        "bytes": sum(one.held.bytes for one in looked),
        "largest_norm": None if largest is None else {"tensor": largest.name, "norm": largest.figures.norm},
    }

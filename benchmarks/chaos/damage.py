"""Files that are not what was written: changed, cut, emptied, swapped, gone, or with code planted in them."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.chaos.common import Bench, Tally, store_of, words
from benchmarks.chaos.victim import Plan
from surefoot.checkpoint.store import CheckpointStore, CheckpointWarning, StoredCheckpoint
from surefoot.checkpoint.store.manifest import MARK

YEAR = 365.25 * 86400
Harm = Callable[[Path, Path, random.Random], None]
"""Takes a file, another of the checkpoint before, and chance."""


def _flip(file: Path, other: Path, dice: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = dice.randrange(len(data) * 8)
    data[at // 8] ^= 1 << at % 8
    _keep_times(file, bytes(data))


def _cut(file: Path, other: Path, dice: random.Random) -> None:
    _keep_times(file, file.read_bytes()[: dice.randrange(file.stat().st_size)])


def _zero(file: Path, other: Path, dice: random.Random) -> None:
    data = bytearray(file.read_bytes())
    begin = dice.randrange(len(data))
    end = min(len(data), begin + dice.choice((1, 64, 4096, len(data))))
    zeroed = data[:begin] + bytes(end - begin) + data[end:]
    if zeroed == data:
        zeroed = bytearray(len(data))
    _keep_times(file, bytes(zeroed))


def _swap(file: Path, other: Path, dice: random.Random) -> None:
    shutil.copy2(other, file)


def _lose(file: Path, other: Path, dice: random.Random) -> None:
    file.unlink()


def _keep_times(file: Path, data: bytes) -> None:
    """Write, and let nothing but the content tell."""
    was = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


HARMS: dict[str, Harm] = {"bit flip": _flip, "truncation": _cut, "zeroing": _zero, "file swap": _swap, "missing": _lose}


def saved_run(bench: Bench) -> Plan:
    """A run of two processes with several checkpoints, made once."""
    plan = Plan(run=str(bench.folder / "whole"), steps=30, every=7, way="waiting", spread="ddp")
    if not Path(plan.run).exists() and any(bench.live(plan, 2)):
        raise RuntimeError(f"a run that nobody touched has failed: {words(plan)}")
    return plan


def damages(bench: Bench, count: int) -> Tally:
    """Each kind of damage, on each file of the newest checkpoint, now and then on the one before as well."""
    tally = Tally(
        "bit flip, truncation, zeroing, file swap, missing file", "all noticed, and an older checkpoint is used"
    )
    run = Path(saved_run(bench).run) / "checkpoints"
    kinds = list(HARMS)
    for k in range(count):
        root = bench.folder / f"damaged-{k}"
        shutil.copytree(run, root)
        kept = CheckpointStore(root).all()
        twice = bench.dice.random() < 0.2
        done = [_harm(one, kept[n + 1], kinds[k % len(kinds)], bench.dice) for n, one in enumerate(kept[: 1 + twice])]
        tally.take(_noticed(root, kept[1 + twice].name, done), f"{', '.join(done)}, {root}")
        shutil.rmtree(root)
    tally.notes.append(_resumed_after_damage(bench, tally))
    return tally


def _harm(kept: StoredCheckpoint, before: StoredCheckpoint, kind: str, dice: random.Random) -> str:
    name = dice.choice([path.name for path in sorted(kept.folder.iterdir()) if path.name != MARK])
    HARMS[kind](kept.folder / name, before.folder / name, dice)
    return f"{kind} of {name} in {kept.name}"


def _noticed(root: Path, expected: str, done: list[str]) -> str:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kept = CheckpointStore(root).newest()
    if kept is None or kept.name != expected:
        return f"{None if kept is None else kept.name} was taken"
    said = " ".join(str(w.message) for w in told if issubclass(w.category, CheckpointWarning))
    unnamed = [what for what in done if what.rpartition(" ")[2] not in said]
    return f"the warning does not name {unnamed}: {said}" if unnamed else ""


def _resumed_after_damage(bench: Bench, tally: Tally) -> str:
    """Once through the whole way: the run goes on from the one before, and ends as it would have."""
    plan = Plan(run=bench.new("damaged"), steps=40, every=9, way="waiting")
    bench.live(replace(plan, steps=30))
    newest, before = store_of(plan).all()[:2]
    _flip(next(newest.folder.glob("*.safetensors")), newest.folder, bench.dice)
    codes = bench.live(plan)
    wrong = words(plan) if any(codes) else bench.compare(plan)
    begun = int(Path(f"{plan.run}.begun-0").read_text())
    if begun != before.step:
        wrong = wrong or f"it went on from step {begun}, and {before.step} was whole"
    tally.take(wrong, "a whole run after a bit flip")
    return f"a run whose newest checkpoint was harmed went on from step {begun}, and ended bit-equal"


# -- code


class _Planted:
    """Whoever unpickles this, runs code."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)


def planted(bench: Bench, count: int) -> Tally:
    """Code in the place of each file that is read, also with a manifest that says it belongs there."""
    tally = Tally(
        "code planted in every file that is read",
        "nothing runs, and for files of a checkpoint the error names the file",
    )
    plan = Plan(run=bench.new("planted"), steps=12, every=1000)
    bench.live(plan)
    names = sorted(path.relative_to(plan.run) for path in Path(plan.run).rglob("*") if path.is_file())
    for name in names[: count or None]:
        inside = name.parts[0] == "checkpoints"
        for sealed in (False, True) if inside and name.name not in ("manifest.json", MARK) else (False,):
            copy = replace(plan, run=bench.new("planted"), steps=20)
            shutil.copytree(plan.run, copy.run)
            trace = Path(f"{copy.run}.trace")
            _plant(Path(copy.run) / name, trace, sealed=sealed)
            codes = bench.live(copy)
            said = words(copy)
            wrong = "the code was run" if trace.exists() else ""
            if inside and name.name != MARK and (not any(codes) or name.name not in said):
                wrong = wrong or f"ended with {codes} and did not name the file: {said}"
            tally.take(wrong, f"{name}{', with a manifest that fits' * sealed}, {copy.run}")
    return tally


def _plant(file: Path, trace: Path, *, sealed: bool) -> None:
    file.write_bytes(pickle.dumps(_Planted(trace)))
    if sealed:
        from surefoot.checkpoint.store.files import hash_file
        from surefoot.checkpoint.store.manifest import NAME, Manifest
        from surefoot.checkpoint.store.stored_checkpoint import read_checkpoint

        kept = read_checkpoint(file.parent)
        entries = {**kept.files, file.name: hash_file(file)}
        about = dict(kept.about)
        data = Manifest(step=kept.step, attempt=kept.attempt or 0, about=about, files=entries).as_bytes()
        (file.parent / NAME).write_bytes(data)


# -- clocks


def clocks(bench: Bench, count: int) -> Tally:
    """Clocks that go wrong by a year between two lives, and files that say they are of another year."""
    tally = Tally("clock set back or forward by a year, and files dated so", "the right checkpoint is chosen")
    for k in range(count):
        way, years = ("clock", "dates")[k // 2 % 2], 1 if k % 2 else -1
        plan = Plan(run=bench.new("clock"), steps=14 + k, every=5, way="waiting")
        bench.live(plan)
        if way == "dates":
            _redate(store_of(plan).newest(), years)
        later = replace(plan, steps=30 + k, year=years if way == "clock" else 0)
        first = bench.live(later)
        then = replace(later, steps=40 + k, year=0)
        codes = first + bench.live(then)
        begun = int(Path(f"{plan.run}.begun-0").read_text())
        wrong = words(plan) if any(codes) else bench.compare(then)
        if begun != 30 + k:
            wrong = wrong or f"it went on from {begun}, and not from {30 + k}"
        tally.take(wrong, f"{way} by {years} years, {plan.run}")
    return tally


def _redate(kept: StoredCheckpoint | None, years: int) -> None:
    assert kept is not None
    when = time.time() + years * YEAR
    for path in (kept.folder, *kept.folder.iterdir()):
        os.utime(path, (when, when))

"""Corrupted checkpoint files (flipped bits, truncated, zeroed, swapped, missing), planted pickles, and wrong clocks."""

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

from benchmarks.chaos.training_run import RunPlan
from benchmarks.chaos.trials import ChaosBench, FaultTally, log_tail, store_of
from surefoot.checkpoint.store import CheckpointStore, CheckpointWarning, StoredCheckpoint
from surefoot.checkpoint.store.manifest import MARK

YEAR = 365.25 * 86400
Corruption = Callable[[Path, Path, random.Random], None]
"""Takes a file, its counterpart in the previous checkpoint, and a random generator."""


def _flip_bit(file: Path, other: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) * 8)
    data[at // 8] ^= 1 << at % 8
    _write_keeping_mtime(file, bytes(data))


def _truncate(file: Path, other: Path, rng: random.Random) -> None:
    _write_keeping_mtime(file, file.read_bytes()[: rng.randrange(file.stat().st_size)])


def _zero(file: Path, other: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    begin = rng.randrange(len(data))
    end = min(len(data), begin + rng.choice((1, 64, 4096, len(data))))
    zeroed = data[:begin] + bytes(end - begin) + data[end:]
    if zeroed == data:
        zeroed = bytearray(len(data))
    _write_keeping_mtime(file, bytes(zeroed))


def _swap(file: Path, other: Path, rng: random.Random) -> None:
    shutil.copy2(other, file)


def _delete(file: Path, other: Path, rng: random.Random) -> None:
    file.unlink()


def _write_keeping_mtime(file: Path, data: bytes) -> None:
    """Write without changing the file's times, so that only the content differs."""
    before = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


CORRUPTIONS: dict[str, Corruption] = {
    "bit flip": _flip_bit,
    "truncation": _truncate,
    "zeroing": _zero,
    "file swap": _swap,
    "missing": _delete,
}


def saved_run(bench: ChaosBench) -> RunPlan:
    """A finished run of two ranks with several checkpoints, made once."""
    plan = RunPlan(run=str(bench.folder / "uninterrupted"), steps=30, save_every=7, mode="waiting", strategy="ddp")
    if not Path(plan.run).exists() and any(bench.run_to_end(plan, 2)):
        raise RuntimeError(f"an uninterrupted run failed: {log_tail(plan)}")
    return plan


def corrupt_files(bench: ChaosBench, count: int) -> FaultTally:
    """Corrupt a file of the newest checkpoint in every way; in one trial of five also one of the checkpoint before."""
    tally = FaultTally(
        "bit flip, truncation, zeroing, file swap, missing file", "always detected, and an older checkpoint is used"
    )
    run = Path(saved_run(bench).run) / "checkpoints"
    kinds = list(CORRUPTIONS)
    for k in range(count):
        root = bench.folder / f"damaged-{k}"
        shutil.copytree(run, root)
        stored = CheckpointStore(root).all()
        bad = 1 + (bench.rng.random() < 0.2)
        kind = kinds[k % len(kinds)]
        damage = [_corrupt(stored[n], stored[n + 1], kind, bench.rng) for n in range(bad)]
        tally.record(_check_fallback(root, stored[bad].name, damage), f"{', '.join(damage)}, {root}")
        shutil.rmtree(root)
    tally.notes.append(_resume_after_corruption(bench, tally))
    return tally


def _corrupt(checkpoint: StoredCheckpoint, previous: StoredCheckpoint, kind: str, rng: random.Random) -> str:
    name = rng.choice([path.name for path in sorted(checkpoint.folder.iterdir()) if path.name != MARK])
    CORRUPTIONS[kind](checkpoint.folder / name, previous.folder / name, rng)
    return f"{kind} of {name} in {checkpoint.name}"


def _check_fallback(root: Path, expected: str, damage: list[str]) -> str:
    """Whether the store falls back to the expected checkpoint and warns of every damaged one; empty if so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = CheckpointStore(root).newest()
    if chosen is None or chosen.name != expected:
        return f"{None if chosen is None else chosen.name} was chosen"
    message = " ".join(str(w.message) for w in caught if issubclass(w.category, CheckpointWarning))
    unnamed = [description for description in damage if description.rpartition(" ")[2] not in message]
    return f"the warning does not name {unnamed}: {message}" if unnamed else ""


def _resume_after_corruption(bench: ChaosBench, tally: FaultTally) -> str:
    """Once end to end: a run with a corrupted newest checkpoint resumes from the one before and ends bit-equal."""
    plan = RunPlan(run=bench.new_run_path("damaged"), steps=40, save_every=9, mode="waiting")
    bench.run_to_end(replace(plan, steps=30))
    newest, previous = store_of(plan).all()[:2]
    _flip_bit(next(newest.folder.glob("*.safetensors")), newest.folder, bench.rng)
    codes = bench.run_to_end(plan)
    error = log_tail(plan) if any(codes) else bench.compare(plan)
    first_step = int(Path(f"{plan.run}.begun-0").read_text())
    if first_step != previous.step:
        error = error or f"it resumed from step {first_step}, and step {previous.step} was intact"
    tally.record(error, "a complete run after a bit flip")
    return f"a run whose newest checkpoint was corrupted resumed from step {first_step} and ended bit-equal"


# -- planted pickles


class _MaliciousPickle:
    """Unpickling this creates the folder `trace`."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)


def plant_code(bench: ChaosBench, count: int) -> FaultTally:
    """Replace every file that is read by a malicious pickle, also with a manifest that matches it."""
    tally = FaultTally(
        "malicious pickle in place of every file that is read",
        "no code runs, and for files of a checkpoint the error names the file",
    )
    plan = RunPlan(run=bench.new_run_path("planted"), steps=12, save_every=1000)
    bench.run_to_end(plan)
    names = sorted(path.relative_to(plan.run) for path in Path(plan.run).rglob("*") if path.is_file())
    for name in names[: count or None]:
        inside = name.parts[0] == "checkpoints"
        for sealed in (False, True) if inside and name.name not in ("manifest.json", MARK) else (False,):
            copy = replace(plan, run=bench.new_run_path("planted"), steps=20)
            shutil.copytree(plan.run, copy.run)
            trace = Path(f"{copy.run}.trace")
            _write_malicious(Path(copy.run) / name, trace, sealed=sealed)
            codes = bench.run_to_end(copy)
            output = log_tail(copy)
            error = "the planted code ran" if trace.exists() else ""
            if inside and name.name != MARK and (not any(codes) or name.name not in output):
                error = error or f"exited with {codes} and did not name the file: {output}"
            tally.record(error, f"{name}{', with a matching manifest' * sealed}, {copy.run}")
    return tally


def _write_malicious(file: Path, trace: Path, *, sealed: bool) -> None:
    file.write_bytes(pickle.dumps(_MaliciousPickle(trace)))
    if sealed:
        from surefoot.checkpoint.store.files import hash_file
        from surefoot.checkpoint.store.manifest import NAME, Manifest
        from surefoot.checkpoint.store.stored_checkpoint import read_checkpoint

        checkpoint = read_checkpoint(file.parent)
        files = {**checkpoint.files, file.name: hash_file(file)}
        about = dict(checkpoint.about)
        data = Manifest(step=checkpoint.step, attempt=checkpoint.attempt or 0, about=about, files=files).as_bytes()
        (file.parent / NAME).write_bytes(data)


# -- clocks


def shift_clocks(bench: ChaosBench, count: int) -> FaultTally:
    """Shift the clock, or the files' times, by a year between two runs of the same job."""
    tally = FaultTally("clock, or the files' times, shifted a year back or forward", "the right checkpoint is chosen")
    for k in range(count):
        shifted, years = ("clock", "dates")[k // 2 % 2], 1 if k % 2 else -1
        plan = RunPlan(run=bench.new_run_path("clock"), steps=14 + k, save_every=5, mode="waiting")
        bench.run_to_end(plan)
        if shifted == "dates":
            _set_mtimes(store_of(plan).newest(), years)
        later = replace(plan, steps=30 + k, clock_years=years if shifted == "clock" else 0)
        first = bench.run_to_end(later)
        final = replace(later, steps=40 + k, clock_years=0)
        codes = first + bench.run_to_end(final)
        first_step = int(Path(f"{plan.run}.begun-0").read_text())
        error = log_tail(plan) if any(codes) else bench.compare(final)
        if first_step != 30 + k:
            error = error or f"it resumed from step {first_step}, not from {30 + k}"
        tally.record(error, f"{shifted} by {years} years, {plan.run}")
    return tally


def _set_mtimes(checkpoint: StoredCheckpoint | None, years: int) -> None:
    assert checkpoint is not None
    when = time.time() + years * YEAR
    for path in (checkpoint.folder, *checkpoint.folder.iterdir()):
        os.utime(path, (when, when))

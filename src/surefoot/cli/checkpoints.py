"""`surefoot checkpoints` on the console: list, verify, compare, export, convert."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from surefoot.checkpoint.store import CheckpointStore, StoredCheckpoint
from surefoot.journal.output_files import OutputRefused, check_output
from surefoot.logs.log_diagnosis import UnreadableInput

FINE, TROUBLE, UNUSABLE = 0, 1, 2
_COLUMNS = {
    "name": "name",
    "step": "step",
    "attempt": "attempt",
    "age": "age",
    "size": "size",
    "kind": "kind",
    "health": "health",
    "whole": "intact",
}
"""Keys of a row, and the headers of the table."""


def show_list(run: Path, *, as_json: bool = False, verify: bool = False) -> int:
    """List the checkpoints of a run; `verify` reads all of their bytes."""
    return _with_messages(lambda: _list(_store(run), as_json=as_json, verify=verify))


def show_comparison(run: Path, first: str, second: str, *, as_json: bool = False) -> int:
    """Show how two checkpoints differ."""

    def compare_them() -> int:
        from surefoot.cli.compare_checkpoints import compare

        store = _store(run)
        comparison = compare(_find(store, first), _find(store, second))
        print(json.dumps(comparison.as_json(), indent=1) if as_json else comparison.as_text())
        return FINE

    return _with_messages(compare_them)


def show_export(run: Path, which: str, out: Path, *, weights: str = "model", as_json: bool = False) -> int:
    """Export the weights of a checkpoint for inference."""

    def export_it() -> int:
        store = _store(run)
        _print_result(_export(store, _find(store, which), out, weights), as_json)
        return FINE

    return _with_messages(export_it)


def show_conversion(file: Path, out: Path, *, as_json: bool = False) -> int:
    """Convert a file of torch.save."""

    def convert_it() -> int:
        from surefoot.cli.convert_checkpoint import convert

        _print_result(convert(file, out), as_json)
        return FINE

    return _with_messages(convert_it)


def _with_messages(work: Callable[[], int]) -> int:
    """Bad input becomes one message and exit code 2."""
    try:
        return work()
    except (UnreadableInput, OutputRefused) as error:
        print(f"surefoot checkpoints: {error}", file=sys.stderr)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"surefoot checkpoints: {where}{error.strerror or error}", file=sys.stderr)
    return UNUSABLE


def _print_result(result: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(result, indent=1) if as_json else result["words"])


def _store(run: Path) -> CheckpointStore:
    return CheckpointStore(_checkpoint_folder(run))


def _checkpoint_folder(run: Path) -> Path:
    """The folder of checkpoints: inside the run directory, or `run` itself."""
    if not run.exists():
        raise UnreadableInput(f"{run} does not exist. Name the run_dir given to surefoot.attach")
    if not run.is_dir():
        raise UnreadableInput(f"{run} is a file. Name the run_dir given to surefoot.attach")
    inside = run / "checkpoints"
    if inside.is_dir():
        return inside
    if run.name == "checkpoints" or (run / "run.json").exists() or any(run.glob("step-*")):
        return run if run.name == "checkpoints" or not (run / "run.json").exists() else inside
    raise UnreadableInput(f"{run} is not a run directory: it holds neither checkpoints nor a run.json")


def _find(store: CheckpointStore, which: str) -> StoredCheckpoint:
    """A checkpoint by its name, its step (the last saved of that step), or `newest`."""
    stored = store.all()
    for checkpoint in stored:
        if which in (checkpoint.name, str(checkpoint.step), "newest"):
            if not checkpoint.seal:
                raise UnreadableInput(f"{checkpoint.name} cannot be used: {', '.join(map(str, checkpoint.problems))}")
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in stored[:8]) or "none"
    raise UnreadableInput(f"{store.root} has no checkpoint {which}; its steps are {steps}")


def _list(store: CheckpointStore, *, as_json: bool, verify: bool) -> int:
    stored = store.all()
    if verify:
        stored = list(_verify(store, stored))
    now = time.time()
    rows = [_row(checkpoint, now, verified=verify) for checkpoint in stored]
    if as_json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print(f"no checkpoints in {store.root}")
    else:
        print(_table(rows))
        for checkpoint in stored:
            _print_details(checkpoint)
    return TROUBLE if any(checkpoint.problems and not checkpoint.newer_version for checkpoint in stored) else FINE


def _print_details(checkpoint: StoredCheckpoint) -> None:
    for problem in checkpoint.problems:
        print(f"{checkpoint.name}: {problem}")
    if checkpoint.extra:
        print(f"{checkpoint.name}: files that are not part of it, ignored: {', '.join(checkpoint.extra[:5])}")
    if checkpoint.reason:
        print(f"{checkpoint.name}: {checkpoint.health}, {checkpoint.reason}")


def _verify(store: CheckpointStore, stored: Sequence[StoredCheckpoint]) -> Iterable[StoredCheckpoint]:
    """Read every byte, with a progress bar on a terminal."""
    total = sum(checkpoint.size for checkpoint in stored)
    with _ProgressBar(total) if sys.stderr.isatty() else nullcontext() as advance:
        for checkpoint in stored:
            yield store.verify(checkpoint, advance)


class _ProgressBar:
    """Bytes read so far, on standard error."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("reading", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._progress.start()
        return lambda count: self._progress.advance(self._task, count)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _row(checkpoint: StoredCheckpoint, now: float, *, verified: bool) -> dict[str, Any]:
    saved_at = checkpoint.about.get("time")
    age = now - saved_at if isinstance(saved_at, int | float) else None
    return {
        "name": checkpoint.name,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "age": age,
        "size": checkpoint.size,
        "kind": checkpoint.kind,
        "health": checkpoint.health,
        "why": checkpoint.reason,
        "whole": False if checkpoint.problems else True if verified else None,
        "wrong": [{"file": problem.file, "what": problem.what} for problem in checkpoint.problems],
        "extra": list(checkpoint.extra),
        "metrics": checkpoint.about.get("metrics", {}),
    }


_INTACT = {True: "yes", False: "NO", None: "not read"}


def _table(rows: list[dict[str, Any]]) -> str:
    shown = [
        row | {"age": _format_age(row["age"]), "size": _format_size(row["size"]), "whole": _INTACT[row["whole"]]}
        for row in rows
    ]
    lines = [tuple(_COLUMNS.values()), *(tuple(str(row[column]) for column in _COLUMNS) for row in shown)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _format_age(seconds: float | None) -> str:
    if seconds is None or seconds < 0:
        return "?"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _format_size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _export(store: CheckpointStore, checkpoint: StoredCheckpoint, out: Path, weights: str) -> dict[str, Any]:
    """Export the weights alone, after verifying the checkpoint."""
    check_output(out, new=True)
    problems = store.verify(checkpoint).problems
    if problems:
        raise UnreadableInput(f"{checkpoint.name} is damaged ({', '.join(map(str, problems[:3]))}). Export another one")
    try:
        export = importlib.import_module("surefoot.checkpoint.format.export").export
    except ModuleNotFoundError as error:
        what = "torch, which is not installed" if error.name == "torch" else "a part that this version does not have"
        raise UnreadableInput(f"export needs {what}") from None
    try:
        count = export(checkpoint.folder, out, source=weights)
    except ValueError as error:
        raise UnreadableInput(str(error)) from None
    return {"words": f"{count} tensors written to {out}", "tensors": count, "out": str(out)}

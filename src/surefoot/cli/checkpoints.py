"""`surefoot checkpoints` on the console: which there are, whether they are whole, how two differ."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.checkpoint.store import CheckpointStore, StoredCheckpoint
from surefoot.journal.output_files import OutputRefused, check_output
from surefoot.logs.table import Unreadable

FINE, TROUBLE, UNUSABLE = 0, 1, 2
_HEAD = ("name", "step", "attempt", "age", "size", "kind", "health", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the options asked for; one of them at a time."""

    as_json: bool = False
    verify: bool = False
    compare: tuple[str, str] | None = None
    export: tuple[str, Path] | None = None
    weights: str = "model"
    """Whose weights to export."""
    convert: tuple[Path, Path] | None = None


def show(run: Path | None, wishes: Wishes) -> int:
    """Do what was asked for and print what there is to say; bad input ends in one message."""
    try:
        return _show(run, wishes)
    except (Unreadable, OutputRefused) as wrong:
        print(f"surefoot checkpoints: {wrong}", file=sys.stderr)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"surefoot checkpoints: {where}{error.strerror or error}", file=sys.stderr)
    return UNUSABLE


def _show(run: Path | None, wishes: Wishes) -> int:
    if sum(map(bool, (wishes.verify, wishes.compare, wishes.export, wishes.convert))) > 1:
        raise Unreadable("use one of --verify, --compare, --export and --convert at a time")
    if wishes.convert:
        from surefoot.cli.converting import convert

        _say(convert(*wishes.convert), wishes.as_json)
        return FINE
    if run is None:
        raise Unreadable("name a run: surefoot checkpoints RUN")
    store = CheckpointStore(_root(run))
    if wishes.compare:
        from surefoot.cli.comparing import compare

        first, second = (_chosen(store, which) for which in wishes.compare)
        found = compare(first, second)
        print(json.dumps(found.as_json(), indent=1) if wishes.as_json else found.as_text())
        return FINE
    if wishes.export:
        which, out = wishes.export
        _say(_export(store, _chosen(store, which), out, wishes.weights), wishes.as_json)
        return FINE
    return _list(store, wishes)


def _say(told: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(told, indent=1) if as_json else told["words"])


# -- which there are


def _root(run: Path) -> Path:
    """The folder of checkpoints: in the run's, or the one that was named itself."""
    if not run.exists():
        raise Unreadable(f"{run} is not there. Name the run_dir that was given to surefoot.attach")
    if not run.is_dir():
        raise Unreadable(f"{run} is a file. Name the run_dir that was given to surefoot.attach")
    inside = run / "checkpoints"
    if inside.is_dir():
        return inside
    if run.name == "checkpoints" or (run / "run.json").exists() or any(run.glob("step-*")):
        return run if run.name == "checkpoints" or not (run / "run.json").exists() else inside
    raise Unreadable(f"{run} is no run directory: it holds neither checkpoints nor a run.json")


def _chosen(store: CheckpointStore, which: str) -> StoredCheckpoint:
    """A checkpoint by its name, by its step (the last saved of that step), or as `newest`."""
    there = store.all()
    for kept in there:
        if which in (kept.name, str(kept.step), "newest"):
            if not kept.seal:
                raise Unreadable(f"{kept.name} cannot be used: {', '.join(map(str, kept.problems))}")
            return kept
    known = ", ".join(str(kept.step) for kept in there[:8]) or "none"
    raise Unreadable(f"{store.root} has no checkpoint {which}; there are the steps {known}")


def _list(store: CheckpointStore, wishes: Wishes) -> int:
    there = store.all()
    if wishes.verify:
        there = list(_verified(store, there))
    now = time.time()
    rows = [_row(kept, now, read=wishes.verify) for kept in there]
    if wishes.as_json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print(f"no checkpoints in {store.root}")
    else:
        print(_table(rows))
        for kept in there:
            _print_details(kept)
    return TROUBLE if any(kept.problems and not kept.newer_version for kept in there) else FINE


def _print_details(kept: StoredCheckpoint) -> None:
    for problem in kept.problems:
        print(f"{kept.name}: {problem}")
    if kept.extra:
        print(f"{kept.name}: not part of it, and never read: {', '.join(kept.extra[:5])}")
    if kept.reason:
        print(f"{kept.name}: {kept.health}, {kept.reason}")


def _verified(store: CheckpointStore, there: Sequence[StoredCheckpoint]) -> Iterable[StoredCheckpoint]:
    """Read all of each; on a terminal it is shown how far that has come."""
    total = sum(kept.size for kept in there)
    with _progress(total) as advance:
        for kept in there:
            yield store.verify(kept, advance)


def _progress(total: int) -> Any:
    if not sys.stderr.isatty():
        return nullcontext()
    return _Bar(total)


class _Bar:
    """How much has been read, on standard error."""

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


def _row(kept: StoredCheckpoint, now: float, *, read: bool) -> dict[str, Any]:
    when = kept.about.get("time")
    age = now - when if isinstance(when, int | float) else None
    return {
        "name": kept.name,
        "step": kept.step,
        "attempt": kept.attempt,
        "age": age,
        "size": kept.size,
        "kind": kept.kind,
        "health": kept.health,
        "why": kept.reason,
        "whole": False if kept.problems else True if read else None,
        "wrong": [{"file": problem.file, "what": problem.what} for problem in kept.problems],
        "extra": list(kept.extra),
        "metrics": kept.about.get("metrics", {}),
    }


_WHOLE = {True: "yes", False: "NO", None: "not read"}


def _table(rows: list[dict[str, Any]]) -> str:
    told = [row | {"age": _age(row["age"]), "size": _size(row["size"]), "whole": _WHOLE[row["whole"]]} for row in rows]
    lines = [_HEAD, *(tuple(str(row[column]) for column in _HEAD) for row in told)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _age(seconds: float | None) -> str:
    if seconds is None or seconds < 0:
        return "?"
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} s"


def _size(count: float) -> str:
    for word in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {word}" if word == "B" else f"{count:.1f} {word}"
        count /= 1000
    return f"{count:.1f} TB"


# -- weights for inference


def _export(store: CheckpointStore, kept: StoredCheckpoint, out: Path, weights: str) -> dict[str, Any]:
    """The weights alone, from a checkpoint that was verified first."""
    check_output(out, new=True)
    wrong = store.verify(kept).problems
    if wrong:
        raise Unreadable(f"{kept.name} is damaged ({', '.join(map(str, wrong[:3]))}). Export another one")
    try:
        export = importlib.import_module("surefoot.checkpoint.format.export").export
    except ModuleNotFoundError as missing:
        what = "torch, which is not installed" if missing.name == "torch" else "a part that this version does not have"
        raise Unreadable(f"--export needs {what}") from None
    try:
        count = export(kept.folder, out, source=weights)
    except ValueError as misfit:
        raise Unreadable(str(misfit)) from None
    return {"words": f"{count} tensors written to {out}", "tensors": count, "out": str(out)}

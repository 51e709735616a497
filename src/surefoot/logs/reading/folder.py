"""A folder: the logs that lie in it, and the one that tells most about the run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.logs import checkpoint
from surefoot.logs.reading import rundir
from surefoot.logs.reading.events import tensorboardfolder, wandblog
from surefoot.logs.reading.meaning import MetricRole, parse_metric_name
from surefoot.logs.table import LogTable, UnreadableInput

_DEPTH = 6
_LISTED = 20_000
"""Files and folders looked at by name."""
_READ = 60
"""Logs read to choose from."""
_BYTES = 1 << 28
"""Bytes of logs read to choose from; at least one is read, however large."""
_TOLD = 6
_PASSED_BY = frozenset(
    {"venv", "env", "node_modules", "site-packages", "__pycache__", "data", "dataset", "datasets", "images", "weights"}
    | {"dist", "build", "src", "tests", "docs", "media", "artifacts", "tokenizer", "pages", "blobs", "snapshots"}
)
_NO_LOGS = re.compile(
    r"\.(?:py|pyc|pyi|ipynb|md|rst|html?|css|js|ts|cc?|cpp|cu|h|hpp|java|go|rs|sh|bat|ps1|ya?ml|toml|cfg|ini|conf|lock"
    r"|png|jpe?g|gif|svg|webp|bmp|pdf|mp4|wav|mp3|pth?|ckpt|bin|h5|keras|safetensors|onnx|gguf|pkl|pickle|np[yz]|parquet"
    r"|arrow|zip|tar|7z|so|dll|exe|model|msgpack|pb|sqlite|db|whl|xml|tex|bib|ttf|woff|patch|diff|index|idx)"
)
_NO_LOG_NAMES = re.compile(
    r"(?:requirements.*|readme.*|licen[cs]e.*|makefile|dockerfile|(?:.*_)?config|(?:.*[_-])?tokenizer.*|vocab.*|merges"
    r"|special_tokens.*|added_tokens.*|generation_config|adapter_config|.*index|package.*|tsconfig|conda.*|pip.*"
    r"|training_args|preprocessor.*|hparams|wandb-metadata|dataset_info|labels|classes)",
    re.I,
)
_CHECKPOINT = re.compile(r"(?:checkpoint|global_step|step|epoch)[-_]?(\d+)", re.I)
ReadFile = Callable[[str], list[LogTable]]


@dataclass(frozen=True, slots=True)
class _Found:
    """One log, or what makes up one."""

    path: Path
    tables: list[LogTable]

    @property
    def points(self) -> int:
        return max((_losses(table) for table in self.tables), default=0)


def read_folder(path: str, read_file: ReadFile) -> list[LogTable]:
    """The log with the most losses in a folder; the others are told in a note."""
    root = Path(path)
    if rundir.is_run_dir(root):
        return [rundir.read_run_dir(root)]
    if (run := _wandb(root, read_file)) is not None:
        return run
    found, looked_at, left = _logs(root, read_file)
    if not found:
        weights = checkpoint.weights_in(root)
        way_out = f"It has weights: pass {weights} to have them looked at" if weights else "Pass the log itself"
        raise UnreadableInput(f"{path} has no log in it that could be read ({looked_at} files were looked at). {way_out}")
    found.sort(key=lambda one: (one.points, _structured(one), _changed(one.path)), reverse=True)
    best, others = found[0], found[1:]
    notes = [_told(root, best, others)] if others or left else [f"read {_short(root, best.path)}"]
    if left:
        notes.append(f"{left} more files were not looked into: pass one of them, or a folder with fewer")
    if weights := checkpoint.weights_in(root):
        notes.append(f"weights lie there too, and were not looked at: surefoot diagnose {weights}")
    ending = next((table.tail for one in others for table in one.tables if "Traceback" in table.tail), "")
    return [replace(table, notes=(*table.notes, *notes), ending=table.tail or ending) for table in best.tables]


def _logs(root: Path, read_file: ReadFile) -> tuple[list[_Found], int, int]:
    """The logs that could be read, how many files were looked at, and how many were left out."""
    found: list[_Found] = []
    events: set[Path] = set()
    files: list[Path] = []
    looked_at = 0
    for here, names in _walk(root):
        looked_at += len(names)
        if here != root and rundir.is_run_dir(here):
            found += _tried(here, lambda file: [rundir.read_run_dir(file)])
            continue
        if any("tfevents" in name for name in names):
            events.add(here)
        files += [here / name for name in names if _perhaps(name)]
    if events:
        top = events.pop() if len(events) == 1 else root
        found += _tried(top, tensorboardfolder.read_event_folder)
    size = left = 0
    for file in _newest_states(files):
        size += _size(file)
        if len(found) >= _READ or (found and size > _BYTES):
            left += 1
            continue
        found += [one for one in _tried(file, lambda one: read_file(str(one))) if _worth(one)]
    return found, looked_at, left


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    listed = 0
    for here, below, names in os.walk(root):
        depth = len(Path(here).relative_to(root).parts)
        kept = [name for name in below if name.lower() not in _PASSED_BY and not name.startswith(".")]
        below[:] = sorted(kept) if depth < _DEPTH and listed < _LISTED else []
        listed += len(below) + len(names)
        yield Path(here), sorted(names)


def _perhaps(name: str) -> bool:
    stem, suffix = os.path.splitext(name.lower().removesuffix(".gz"))
    return (
        "tfevents" not in name
        and not name.startswith(".")
        and not _NO_LOGS.fullmatch(suffix)
        and not (suffix in ("", ".txt", ".json") and _NO_LOG_NAMES.fullmatch(stem))
    )


def _newest_states(files: list[Path]) -> list[Path]:
    """A trainer writes its whole history anew with every checkpoint: the newest has all of it."""
    newest: dict[tuple[Path, str], tuple[float, Path]] = {}
    others: list[Path] = []
    for file in files:
        step = _CHECKPOINT.fullmatch(file.parent.name)
        if step is None and file.name != "trainer_state.json":
            others.append(file)
            continue
        run = (file.parent.parent if step else file.parent, file.name)
        # One beside the checkpoints was written at the end of the run.
        order = float(step[1]) if step else float("inf")
        if run not in newest or order > newest[run][0]:
            newest[run] = (order, file)
    # The likeliest first: there may be more files than are read.
    likely = sorted(others, key=lambda file: (not _likely(file), len(file.parts), -_size(file), file))
    return [file for _, file in newest.values()] + likely


def _likely(file: Path) -> bool:
    return file.suffix.lower() in (".csv", ".jsonl", ".log", ".out", ".err", ".wandb", ".tsv") or bool(
        re.search(r"log|metric|history|progress|result|loss|train", file.name, re.I)
    )


def _tried(path: Path, reader: Callable[[Path], list[LogTable]]) -> list[_Found]:
    try:
        return [_Found(path, reader(path))]
    except (UnreadableInput, OSError):
        return []


def _worth(found: _Found) -> bool:
    """A log with losses, or with the exception that a run ended in."""
    return found.points > 0 or any("Traceback" in table.tail for table in found.tables)


def _wandb(root: Path, read_file: ReadFile) -> list[LogTable] | None:
    """A folder of one W&B run: its record, or what it printed."""
    try:
        run = wandblog.open_run_folder(root)
    except OSError:
        return None
    for file in (run.record, run.console) if run else ():
        found = _tried(file, lambda one: read_file(str(one))) if file else []
        if found and run and any(table.columns for table in found[0].tables):
            return [replace(table, facts={**run.settings, **table.settings}) for table in found[0].tables]
    return None


def _losses(table: LogTable) -> int:
    told = [(parse_metric_name(name), len(column)) for name, column in table.columns.items()]
    return max((count for one, count in told if one.role in (MetricRole.LOSS, MetricRole.PERPLEXITY)), default=0)


def _structured(found: _Found) -> bool:
    return all(table.format != "text" for table in found.tables)


def _told(root: Path, best: _Found, others: list[_Found]) -> str:
    words = f"read {_short(root, best.path)}, which has the most losses ({best.points})"
    if not others:
        return words
    names = [f"{_short(root, one.path)} ({one.points})" for one in others[:_TOLD]]
    more = f" and {len(others) - _TOLD} more" if len(others) > _TOLD else ""
    return f"{words}; there are also {', '.join(names)}{more}"


def _short(root: Path, path: Path) -> str:
    try:
        return str(path.relative_to(root)) if path != root else str(root)
    except ValueError:
        return str(path)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0

"""Finds the logs in a folder, joins the pieces of one run, and reads the one with the most losses."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.inspect import find_weights
from surefoot.logs.formats import surefoot_run, tensorboard_folder, wandb_log
from surefoot.logs.formats.join_pieces import group_pieces, join_tables
from surefoot.logs.formats.metric_names import MetricRole, parse_metric_name
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable

_MAX_DEPTH = 6
_MAX_LISTED = 20_000
"""Files and folders listed at most."""
_MAX_READ = 60
"""Logs read at most."""
_MAX_BYTES = 1 << 28
"""Bytes read at most; at least one log is read, however large."""
_MAX_MENTIONED = 6
_SKIPPED_FOLDERS = frozenset(
    {"venv", "env", "node_modules", "site-packages", "__pycache__", "data", "dataset", "datasets", "images", "weights"}
    | {"dist", "build", "src", "tests", "docs", "media", "artifacts", "tokenizer", "pages", "blobs", "snapshots"}
)
_NOT_A_LOG_SUFFIX = re.compile(
    r"\.(?:py|pyc|pyi|ipynb|md|rst|html?|css|js|ts|cc?|cpp|cu|h|hpp|java|go|rs|sh|bat|ps1|ya?ml|toml|cfg|ini|conf|lock"
    r"|png|jpe?g|gif|svg|webp|bmp|pdf|mp4|wav|mp3|pth?|ckpt|bin|h5|keras|safetensors|onnx|gguf|pkl|pickle|np[yz]|parquet"
    r"|arrow|zip|tar|7z|so|dll|exe|model|msgpack|pb|sqlite|db|whl|xml|tex|bib|ttf|woff|patch|diff|index|idx)"
)
_NOT_A_LOG_NAME = re.compile(
    r"(?:requirements.*|readme.*|licen[cs]e.*|makefile|dockerfile|(?:.*_)?config|(?:.*[_-])?tokenizer.*|vocab.*|merges"
    r"|special_tokens.*|added_tokens.*|generation_config|adapter_config|.*index|package.*|tsconfig|conda.*|pip.*"
    r"|training_args|preprocessor.*|hparams|wandb-metadata|dataset_info|labels|classes)",
    re.I,
)
_CHECKPOINT = re.compile(r"(?:checkpoint|global_step|step|epoch)[-_]?(\d+)", re.I)
ReadFile = Callable[[str], list[LogTable]]


@dataclass(frozen=True, slots=True)
class _FoundLog:
    """One log and its tables."""

    path: Path
    tables: list[LogTable]

    @property
    def points(self) -> int:
        return max((_count_losses(table) for table in self.tables), default=0)


def read_folder(path: str, read_file: ReadFile) -> list[LogTable]:
    """Read the log with the most losses in a folder; a note mentions the others."""
    root = Path(path)
    if surefoot_run.is_run_dir(root):
        return [surefoot_run.read_run_dir(root)]
    if (run := _read_wandb(root, read_file)) is not None:
        return run
    logs, looked_at, left = _find_logs(root, read_file)
    if not logs:
        weights = find_weights(root)
        way_out = f"It contains weights: pass {weights} to inspect them" if weights else "Pass the log itself"
        raise UnreadableInput(f"{path} contains no readable log ({looked_at} files were checked). {way_out}")
    logs = _join_runs(logs)
    logs.sort(key=lambda log: (log.points, _is_structured(log), _modified_at(log.path)), reverse=True)
    best, others = logs[0], logs[1:]
    notes = [_choice_note(root, best, others)] if others or left else [f"read {_relative_path(root, best.path)}"]
    if left:
        notes.append(f"{left} more files were not read: pass one of them, or a smaller folder")
    if weights := find_weights(root):
        notes.append(f"the folder also contains weights, which were not inspected: surefoot diagnose {weights}")
    ending = next((table.tail for log in others for table in log.tables if "Traceback" in table.tail), "")
    return [replace(table, notes=(*table.notes, *notes), tail=table.tail or ending) for table in best.tables]


def _join_runs(logs: list[_FoundLog]) -> list[_FoundLog]:
    """Join the files that are pieces of one run."""
    single = [log for log in logs if len(log.tables) == 1]
    joined = [log for log in logs if len(log.tables) != 1]
    for pieces in group_pieces(single, lambda log: log.path, lambda log: log.tables[0]):
        table = functools.reduce(join_tables, [log.tables[0] for log in pieces])
        if len(pieces) > 1:
            names = ", ".join(log.path.name for log in pieces[:_MAX_MENTIONED])
            more = f" and {len(pieces) - _MAX_MENTIONED} more" if len(pieces) > _MAX_MENTIONED else ""
            note = f"joined {len(pieces)} files of one run, by their steps: {names}{more}"
            table = replace(table, notes=(*table.notes, note))
        joined.append(_FoundLog(pieces[-1].path, [table]))
    return joined


def _find_logs(root: Path, read_file: ReadFile) -> tuple[list[_FoundLog], int, int]:
    """The readable logs, the number of files checked, and the number skipped."""
    logs: list[_FoundLog] = []
    events: set[Path] = set()
    files: list[Path] = []
    looked_at = 0
    for folder, names in _walk(root):
        looked_at += len(names)
        if folder != root and surefoot_run.is_run_dir(folder):
            logs += _try_read(folder, lambda file: [surefoot_run.read_run_dir(file)])
            continue
        if any("tfevents" in name for name in names):
            events.add(folder)
        files += [folder / name for name in names if _may_be_log(name)]
    if events:
        top = events.pop() if len(events) == 1 else root
        logs += _try_read(top, tensorboard_folder.read_event_folder)
    size = left = 0
    for file in _drop_older_states(files):
        size += _file_size(file)
        if len(logs) >= _MAX_READ or (logs and size > _MAX_BYTES):
            left += 1
            continue
        logs += [log for log in _try_read(file, lambda log: read_file(str(log))) if _is_useful(log)]
    return logs, looked_at, left


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    listed = 0
    for folder, below, names in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        kept = [name for name in below if name.lower() not in _SKIPPED_FOLDERS and not name.startswith(".")]
        below[:] = sorted(kept) if depth < _MAX_DEPTH and listed < _MAX_LISTED else []
        listed += len(below) + len(names)
        yield Path(folder), sorted(names)


def _may_be_log(name: str) -> bool:
    stem, suffix = os.path.splitext(name.lower().removesuffix(".gz"))
    return (
        "tfevents" not in name
        and not name.startswith(".")
        and not _NOT_A_LOG_SUFFIX.fullmatch(suffix)
        and not (suffix in ("", ".txt", ".json") and _NOT_A_LOG_NAME.fullmatch(stem))
    )


def _drop_older_states(files: list[Path]) -> list[Path]:
    """Keep only the newest trainer state: trainers write the whole history again with every checkpoint."""
    newest: dict[tuple[Path, str], tuple[float, Path]] = {}
    others: list[Path] = []
    for file in files:
        step = _CHECKPOINT.fullmatch(file.parent.name)
        if step is None and file.name != "trainer_state.json":
            others.append(file)
            continue
        run = (file.parent.parent if step else file.parent, file.name)
        # A file beside the checkpoints was written at the end of the run.
        order = float(step[1]) if step else float("inf")
        if run not in newest or order > newest[run][0]:
            newest[run] = (order, file)
    # The likeliest first: there may be more files than are read.
    likely = sorted(others, key=lambda file: (not _likely(file), len(file.parts), -_file_size(file), file))
    return [file for _, file in newest.values()] + likely


def _likely(file: Path) -> bool:
    return file.suffix.lower() in (".csv", ".jsonl", ".log", ".out", ".err", ".wandb", ".tsv") or bool(
        re.search(r"log|metric|history|progress|result|loss|train", file.name, re.I)
    )


def _try_read(path: Path, reader: Callable[[Path], list[LogTable]]) -> list[_FoundLog]:
    try:
        return [_FoundLog(path, reader(path))]
    except (UnreadableInput, OSError):
        return []


def _is_useful(log: _FoundLog) -> bool:
    """Whether it has losses, or the exception that a run ended in."""
    return log.points > 0 or any("Traceback" in table.tail for table in log.tables)


def _read_wandb(root: Path, read_file: ReadFile) -> list[LogTable] | None:
    """A folder of one W&B run: its record, or what it printed."""
    try:
        run = wandb_log.open_run_folder(root)
    except OSError:
        return None
    for file in (run.record, run.console) if run else ():
        logs = _try_read(file, lambda path: read_file(str(path))) if file else []
        if logs and run and any(table.columns for table in logs[0].tables):
            return [replace(table, settings={**run.settings, **table.settings}) for table in logs[0].tables]
    return None


def _count_losses(table: LogTable) -> int:
    metrics = [(parse_metric_name(name), len(column)) for name, column in table.columns.items()]
    return max(
        (count for metric, count in metrics if metric.role in (MetricRole.LOSS, MetricRole.PERPLEXITY)), default=0
    )


def _is_structured(log: _FoundLog) -> bool:
    return all(table.format != "text" for table in log.tables)


def _choice_note(root: Path, best: _FoundLog, others: list[_FoundLog]) -> str:
    words = f"read {_relative_path(root, best.path)}, which has the most losses ({best.points})"
    if not others:
        return words
    names = [f"{_relative_path(root, log.path)} ({log.points})" for log in others[:_MAX_MENTIONED]]
    more = f" and {len(others) - _MAX_MENTIONED} more" if len(others) > _MAX_MENTIONED else ""
    return f"{words}; other logs: {', '.join(names)}{more}"


def _relative_path(root: Path, path: Path) -> str:
    try:
        return str(path.relative_to(root)) if path != root else str(root)
    except ValueError:
        return str(path)


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _modified_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0

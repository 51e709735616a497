"""Groups the TensorBoard event files of a folder into runs and joins their tables."""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path

import numpy as np

from surefoot.logs.formats.join_pieces import group_pieces, join_tables
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.formats.tensorboard_log import FORMAT, EventReader
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import MAX_COLUMNS, LogColumn, LogTable

_MAX_FOLDERS = 500
_SPLIT_NAMES = frozenset(
    {"train", "training", "val", "valid", "validation", "eval", "evaluation", "test", "dev"}  # used by Keras and TF
)


def read_event_folder(path: str | os.PathLike[str]) -> list[LogTable]:
    """The runs in a folder and its subfolders, oldest first.

    Files of one folder are one run in order of time, as a resume writes a new file. Folders named after a split (Keras'
    `train` and `validation`) and those made by PyTorch's `add_scalars` (`loss_train` with the tag `loss`) belong to the
    parent folder; their columns get the folder's name as prefix. All other folders are separate runs.
    """
    root = Path(path)
    folders = _find_event_folders(root)
    if not folders:
        raise UnreadableInput(f"{root} contains no TensorBoard event files (events.out.tfevents...)")
    errors: list[str] = []
    runs: dict[Path, list[tuple[str, LogTable]]] = {}
    for folder, files in folders[:_MAX_FOLDERS]:
        table, repeats = _read_one_folder(folder, files, errors)
        if table is None or (repeats and folder.parent in runs):
            continue
        home, prefix = _run_of(folder, table, root, runs)
        runs.setdefault(home, []).append((prefix, table))
    if not runs:
        raise UnreadableInput(
            errors[0] if errors else f"{root} has TensorBoard event files, but no number in any of them"
        )
    if len(folders) > _MAX_FOLDERS:
        errors.append(f"{root} has {len(folders)} folders with event files; the first {_MAX_FOLDERS} were read")
    tables = [_join_tables(str(home), parts, errors) for home, parts in runs.items()]
    pieces = group_pieces(tables, lambda table: Path(table.path), lambda table: table)
    tables = [functools.reduce(join_tables, sorted(tables, key=_start_time)) for tables in pieces]
    return sorted(tables, key=_start_time)


def _find_event_folders(root: Path) -> list[tuple[Path, list[Path]]]:
    """Folders with event files, parents first."""
    folders: list[tuple[Path, list[Path]]] = []
    for folder, below, names in os.walk(root):
        below.sort()
        files = [Path(folder, name) for name in sorted(names) if "tfevents" in name]
        if files:
            folders.append((Path(folder), files))
    return folders


def _read_one_folder(folder: Path, files: list[Path], errors: list[str]) -> tuple[LogTable | None, bool]:
    """The files of one folder as one table, and whether it only repeats numbers for the hyperparameter dashboard."""
    tables: list[tuple[str, LogTable]] = []
    repeats = False
    for file in files:
        reader = EventReader()
        try:
            with LogSource.open(file) as source:
                reader.read(source)
        except UnreadableInput as error:
            errors.append(str(error))
            continue
        repeats = repeats or reader.hyperparameters
        table = reader.table(str(file))
        if table.columns:
            tables.append(("", table))
    tables.sort(key=lambda pair: _start_time(pair[1]))
    if not tables:
        return None, repeats
    return (tables[0][1] if len(tables) == 1 else _join_tables(str(folder), tables, [])), repeats


def _run_of(
    folder: Path, table: LogTable, root: Path, runs: dict[Path, list[tuple[str, LogTable]]]
) -> tuple[Path, str]:
    """The run that a folder belongs to, and the prefix for its columns."""
    above = folder.parent
    if folder == root:
        return folder, ""
    tags = [name for name in table.columns if name not in ("step", "wall_time")]
    if folder.name.lower() in _SPLIT_NAMES:
        return above, folder.name + "/"
    if above in runs and all(folder.name.startswith(tag.replace("/", "_") + "_") for tag in tags):
        return above, folder.name + "/"
    return folder, ""


def _join_tables(path: str, parts: list[tuple[str, LogTable]], notes: list[str]) -> LogTable:
    """Join tables, ordering records by time."""
    places = _merged_order([table for _, table in parts])
    gathered: dict[str, list[LogColumn]] = {}
    skipped: Counter[str] = Counter()
    for (prefix, table), place in zip(parts, places, strict=True):
        skipped.update(table.skipped)
        for name, column in table.columns.items():
            full = name if name in ("step", "wall_time") else prefix + name
            gathered.setdefault(full, []).append(LogColumn(place[column.rows], column.values))
    if len(gathered) > MAX_COLUMNS:
        kept = ["step", "wall_time", *(name for name in gathered if name not in ("step", "wall_time"))][:MAX_COLUMNS]
        skipped[f"values under names beyond the first {MAX_COLUMNS}"] += len(gathered) - len(kept)
        gathered = {name: gathered[name] for name in kept if name in gathered}
    return LogTable(
        format=FORMAT,
        path=path,
        records=sum(table.records for _, table in parts),
        columns={name: _sort_by_row(columns) for name, columns in gathered.items()},
        skipped=dict(skipped),
        notes=tuple(dict.fromkeys([*(note for _, table in parts for note in table.notes), *notes])),
        settings={name: value for _, table in parts for name, value in table.settings.items()},
    )


def _merged_order(tables: list[LogTable]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The position of each record among all; within one table the order stays, whatever its clock says."""
    times = [_record_times(table) for table in tables]
    order = np.argsort(np.concatenate(times), kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return np.split(place, np.cumsum([len(time) for time in times])[:-1])


def _record_times(table: LogTable) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    column = table.columns.get("wall_time")
    if column is None or not len(column):
        return np.zeros(table.records)
    times = np.interp(np.arange(table.records), column.rows, np.maximum.accumulate(np.nan_to_num(column.values)))
    return times


def _sort_by_row(columns: list[LogColumn]) -> LogColumn:
    if len(columns) == 1:
        return columns[0]
    rows = np.concatenate([column.rows for column in columns])
    order = np.argsort(rows, kind="stable")
    return LogColumn(rows[order], np.concatenate([column.values for column in columns])[order])


def _start_time(table: LogTable) -> float:
    column = table.columns.get("wall_time")
    return float(column.values[0]) if column is not None and len(column) else 0.0

"""One JSON document of a run: a trainer state, a history, lists of records, exports of other tools."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.json_records import MAX_DEPTH, RecordBlock, json_number, keep_settings
from surefoot.logs.formats.metric_names import is_counter_field
from surefoot.logs.table import TableBuilder, UnorderedColumns

TRAINER_STATE = "trainer_state"
_WRAPPERS = frozenset(
    {"history", "log_history", "logs", "log", "metrics", "results", "epochs", "records", "data", "rows", "steps"}
    | {"training_history", "train_history", "scalars", "training_log", "iterations", "entries", "events", "values"}
)
_NUMBERED_KEY = re.compile(r"([a-z_ -]*?)[\s_-]*(\d+)", re.I)
_SETTINGS = frozenset(
    {"config", "args", "hparams", "params", "settings", "hyperparameters", "env", "stateful_callbacks"}
)
_COUNTER_NAME = re.compile(r"(?:.*[^a-z])?(?:steps?|epochs?|iters?|iterations?|time|timestamps?)", re.I)


class JsonDocument:
    """Finds the numbers of a run in a document of any shape."""

    def __init__(self, builder: TableBuilder) -> None:
        self._builder = builder
        self._block = RecordBlock(builder)
        self._lists: list[tuple[str, list[float | None]]] = []

    def read(self, value: Any) -> str:
        """Add the document to the table and return the name of its format."""
        state = isinstance(value, dict) and isinstance(value.get("log_history"), list)
        if isinstance(value, dict) and not state and _is_flat(value):
            self._block.add([value])
        else:
            self._walk(value, "", 0)
            self._flush_lists()
        return TRAINER_STATE if state else "json"

    def _walk(self, value: Any, path: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            return
        if isinstance(value, list):
            self._walk_list(cast("list[Any]", value), path)
        elif isinstance(value, dict):
            self._walk_dict(cast("dict[str, Any]", value), path, depth)

    def _walk_dict(self, value: dict[str, Any], path: str, depth: int) -> None:
        if {"columns", "data"} <= value.keys() and isinstance(value["columns"], list):
            self._add_rows(value["columns"], value["data"], path)
        elif keyed := _numbered_items(value):
            self._add_numbered(keyed, path)
        else:
            scalars = {name: item for name, item in value.items() if not isinstance(item, list | dict)}
            keep_settings(self._builder, scalars, path)
            for name, item in value.items():
                if isinstance(item, dict) and name.lower() in _SETTINGS:
                    keep_settings(self._builder, item)
                elif isinstance(item, list | dict):
                    self._walk(item, _join_path(path, name), depth + 1)

    def _add_numbered(self, keyed: tuple[str, list[int], list[Any]], path: str) -> None:
        word, at, values = keyed
        if all(isinstance(item, dict) for item in values):
            even = all(b - a == 1 for a, b in pairwise(at))
            name = word or ("epoch" if even else "step")
            records = [{name: key, **item} for key, item in zip(at, values, strict=True)]
            self._block.add(records, path)
            return
        numbers = [json_number(item) for item in values]
        kept = [(key, item) for key, item in zip(at, numbers, strict=True) if item is not None]
        if kept and [key for key, _ in kept] == list(range(kept[0][0], kept[0][0] + len(kept))):
            self._lists.append((path or "value", [item for _, item in kept]))
        elif kept:
            self._block.add([{"step": key, path or "value": item} for key, item in kept])

    def _walk_list(self, values: list[Any], path: str) -> None:
        if not values:
            return
        kinds = set(map(type, values))
        if dict in kinds:
            records = [item for item in values if isinstance(item, dict)]
            if len(records) < len(values):
                self._builder.skip("entries that are not records", len(values) - len(records))
            self._block.add(records, path)
        elif kinds == {list}:
            self._walk_nested_lists(values, path)
        elif kinds <= {int, float, str, type(None), bool}:
            numbers = [json_number(item) for item in values]
            if any(item is not None for item in numbers):
                self._lists.append((path or "value", numbers))

    def _walk_nested_lists(self, values: list[list[Any]], path: str) -> None:
        if all(isinstance(row, str) for row in values[0]) and len(values[0]) > 1:
            self._add_rows(values[0], values[1:], path)
            return
        width = len(values[0])
        if width == 1:
            self._walk_list([row[0] if row else None for row in values], path)
        elif axes := _counter_columns(values):
            names = [*axes, path or "value"]
            self._block.add([dict(zip(names, row, strict=True)) for row in values])
        else:
            self._add_rows([f"col{index + 1}" for index in range(width)], values, path)

    def _add_rows(self, names: list[Any], rows: Any, path: str) -> None:
        if isinstance(rows, list):
            records = [dict(zip(map(str, names), row, strict=False)) for row in rows if isinstance(row, list)]
            self._block.add(records, path)

    def _flush_lists(self) -> None:
        """Align lists of one length; lists with their own steps are separate records, other short ones are spread."""
        if not self._lists:
            return
        longest = max(len(values) for _, values in self._lists)
        homes = {_parent(name) for name, _ in self._lists if _COUNTER_NAME.fullmatch(_leaf(name))}
        groups: dict[tuple[str, int], dict[str, list[float | None]]] = defaultdict(dict)
        for name, values in self._lists:
            home = _parent(name)
            groups[home if home in homes and (home or len(values) == longest) else "", len(values)][name] = values
        parts = UnorderedColumns(self._builder)
        first = self._builder.records
        self._builder.records += longest
        for (home, length), columns in groups.items():
            apart = bool(home) or (
                length < 0.8 * longest and any(_COUNTER_NAME.fullmatch(_leaf(name)) for name in columns)
            )
            start = self._builder.records if apart else first
            rows = np.arange(length)
            if apart:
                self._builder.records += length
            elif length < 0.8 * longest:
                rows = np.round((rows + 1) * (longest / length)).astype(np.int64) - 1
            for name, values in columns.items():
                _add_list(parts, name, values, rows + start)
        parts.flush()


def _add_list(parts: UnorderedColumns, name: str, values: list[float | None], rows: NDArray[np.int64]) -> None:
    # Counters are shared, whatever object they are in.
    column = _leaf(name) if is_counter_field(_leaf(name)) else name
    present = np.array([value is not None for value in values], dtype=np.bool_)
    parts.add(column, rows[present], np.array(values, dtype=np.float64)[present])
    parts.add_empty(column, rows[~present])


def _leaf(name: str) -> str:
    return name.rpartition("/")[2]


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _is_flat(value: dict[str, Any]) -> bool:
    return not any(isinstance(item, list | dict) for item in value.values())


def _join_path(path: str, name: str) -> str:
    """Append a name to a path, leaving out wrapper names."""
    name = name.strip()
    if name.lower() in _WRAPPERS:
        return path
    return f"{path}/{name}" if path else name


def _numbered_items(value: dict[str, Any]) -> tuple[str, list[int], list[Any]] | None:
    """For a dictionary with a number in every key (0, 1, epoch_2): the word before it, the numbers, the values."""
    if len(value) < 2 and not all(key.isdigit() for key in value):
        return None
    matches = [_NUMBERED_KEY.fullmatch(key) if len(key) < 40 else None for key in value]
    keys = [match for match in matches if match is not None]
    if not keys or len(keys) < len(matches) or len({match[1].lower() for match in keys}) > 1:
        return None
    if not (all(isinstance(item, dict) for item in value.values()) or _is_flat(value)):
        return None
    word = keys[0][1].strip("_- ").lower()
    if word and not _COUNTER_NAME.fullmatch(word):
        return None
    return word, [int(match[2]) for match in keys], list(value.values())


def _counter_columns(values: list[list[Any]]) -> list[str]:
    """The columns before the value: step in pairs; wall time and step in triples exported by TensorBoard."""
    width = len(values[0])
    if width not in (2, 3) or any(len(row) != width for row in values):
        return []
    steps = [row[-2] for row in values]
    if not all(isinstance(row, int | float) and row == row // 1 for row in steps):
        return []
    if len(steps) < 2 or any(b < a for a, b in pairwise(steps)) or steps[0] == steps[-1]:
        return []
    if width == 2:
        return ["step"]
    return ["wall_time", "step"] if isinstance(values[0][0], int | float) and values[0][0] > 1e8 else []

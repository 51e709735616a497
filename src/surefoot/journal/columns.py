"""The numbers of a run as mappings from names to NumPy arrays; rows stay on disk until a column is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from surefoot.journal.row_file import RowHeader
from surefoot.records import JudgedBy, StepMetrics, Verdict


class Scalars(Mapping[str, np.ndarray]):
    """Columns of the attempted updates, one value per row, in the order written: `scalars["loss"]`.

    The names are the fields of `surefoot.records.StepMetrics`. Arrays are read-only; a column that some rows lack
    because another version wrote them is NaN there. `rows` is the number of rows.
    """

    def __init__(self, segments: Sequence[np.ndarray]) -> None:
        self._segments = segments
        self._names = tuple(dict.fromkeys(name for rows in segments for name in rows.dtype.names or ()))
        self._columns: dict[str, np.ndarray] = {}
        self.rows = sum(len(rows) for rows in segments)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(f"no column {name!r}; there are {', '.join(self._names) or 'none'}")
        if name not in self._columns:
            self._columns[name] = _concatenated([_column(rows, name) for rows in self._segments])
        return self._columns[name]

    def as_rows(self, part: slice = slice(None)) -> Iterator[StepMetrics]:
        """The updates one by one, in single precision, as the judge saw them; a missing column has its default."""
        names = [f.name for f in fields(StepMetrics) if f.name in self._names]
        for values in zip(*(self[name][part].tolist() for name in names), strict=True):
            row: dict[str, Any] = dict(zip(names, values, strict=True))
            row["verdict"] = Verdict(row["verdict"])
            judged_by = row.get("judged_by", math.nan)  # NaN where an earlier version wrote the row
            row["judged_by"] = JudgedBy.LOSS if math.isnan(judged_by) else JudgedBy(int(judged_by))
            yield StepMetrics(**row)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Scalars({self.rows} rows of {', '.join(self._names) or 'nothing'})"


def _column(rows: np.ndarray, name: str) -> np.ndarray:
    return rows[name] if name in (rows.dtype.names or ()) else np.full(len(rows), np.nan, np.float32)


def _concatenated(arrays: Sequence[np.ndarray], empty: type = np.float32) -> np.ndarray:
    column = np.concatenate(arrays) if arrays else np.empty(0, empty)
    column.setflags(write=False)
    return column


class Layers(Mapping[str, "LayerStats"]):
    """Per-tensor statistics by tensor name: `layers["block.0.weight"]["norm"]`, one value per row.

    `steps` and `attempts` give the step and attempt of each row: every one of the newest, fewer the older they are. A
    value is NaN where the tensor had no gradient or, in a run whose tensors changed, did not exist. `numels` holds the
    tensor sizes, and `grid("norm")` is one statistic of all tensors as an array [rows, tensors] in iteration order.
    """

    def __init__(self, segments: Sequence[tuple[RowHeader, np.ndarray]]) -> None:
        self._segments = segments
        self._positions = [{name: at for at, name in enumerate(header.names)} for header, _ in segments]
        self.numels: dict[str, int] = {}
        for header, _ in segments:
            self.numels.update(zip(header.names, header.numels, strict=True))
        self.stats = tuple(dict.fromkeys(stat for header, _ in segments for stat in header.stats))
        self.steps = _concatenated([rows["step"] for _, rows in segments], np.int64)
        self.attempts = _concatenated([rows["attempt"] for _, rows in segments], np.int64)

    @property
    def rows(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> LayerStats:
        if name not in self.numels:
            raise KeyError(f"no tensor {name!r}; there are {len(self.numels)}, such as {', '.join(list(self)[:3])}")
        return LayerStats(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.numels)

    def __len__(self) -> int:
        return len(self.numels)

    def __repr__(self) -> str:
        return f"Layers({len(self)} tensors, {self.rows} rows of {', '.join(self.stats) or 'nothing'})"

    def grid(self, stat: str) -> np.ndarray:
        """One statistic of all tensors, [rows, tensors]."""
        self._check_stat(stat)
        return _concatenated([self._values(number, list(self), stat) for number in range(len(self._segments))])

    def column(self, name: str, stat: str) -> np.ndarray:
        """One statistic of one tensor, [rows]."""
        self._check_stat(stat)
        return _concatenated([self._values(number, [name], stat)[:, 0] for number in range(len(self._segments))])

    def _check_stat(self, stat: str) -> None:
        if stat not in self.stats:
            raise KeyError(f"no statistic {stat!r}; there are {', '.join(self.stats) or 'none'}")

    def _values(self, number: int, names: Sequence[str], stat: str) -> np.ndarray:
        (header, rows), positions = self._segments[number], self._positions[number]
        grid = np.full((len(rows), len(names)), np.nan, np.float32)
        known = [(column, positions[name]) for column, name in enumerate(names) if name in positions]
        if known and stat in header.stats:
            columns, tensors = (list(side) for side in zip(*known, strict=True))
            values = rows["stats"][:, tensors, header.stats.index(stat)]
            if "nonfinite" in header.stats:
                no_grad = rows["stats"][:, tensors, header.stats.index("nonfinite")] == -1
                values = np.where(no_grad, np.float32(np.nan), values)
            grid[:, columns] = values
        return grid


class LayerStats(Mapping[str, np.ndarray]):
    """The statistics of one tensor, one value per row of its `Layers`."""

    def __init__(self, layers: Layers, name: str) -> None:
        self._layers = layers
        self.name = name

    def __getitem__(self, stat: str) -> np.ndarray:
        return self._layers.column(self.name, stat)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers.stats)

    def __len__(self) -> int:
        return len(self._layers.stats)

    def __repr__(self) -> str:
        return f"LayerStats({self.name!r}, {self._layers.rows} rows of {', '.join(self)})"

"""The numbers of a run as mappings from names to NumPy arrays, over rows that stay on disk until asked for."""

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

    The names are the fields of `surefoot.records.StepMetrics`. Arrays are read-only; a column that some of the rows lack,
    because another version wrote them, is NaN there. `rows` says how many rows there are.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self._names = tuple(dict.fromkeys(name for part in parts for name in part.dtype.names or ()))
        self._columns: dict[str, np.ndarray] = {}
        self.rows = sum(len(part) for part in parts)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(f"no column {name!r}; there are {', '.join(self._names) or 'none'}")
        if name not in self._columns:
            self._columns[name] = _joined([_column(part, name) for part in self._parts])
        return self._columns[name]

    def as_rows(self, part: slice = slice(None)) -> Iterator[StepMetrics]:
        """The updates one by one, to single precision, as they were judged; a missing column has its default."""
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


def _column(part: np.ndarray, name: str) -> np.ndarray:
    return part[name] if name in (part.dtype.names or ()) else np.full(len(part), np.nan, np.float32)


def _joined(arrays: Sequence[np.ndarray], empty: type = np.float32) -> np.ndarray:
    joined = np.concatenate(arrays) if arrays else np.empty(0, empty)
    joined.setflags(write=False)
    return joined


class Layers(Mapping[str, "LayerStats"]):
    """Per-tensor statistics by tensor name: `layers["block.0.weight"]["norm"]`, one value per row.

    Rows stand at `steps` and `attempts`: all of the newest, fewer the older. A value is NaN where the tensor had no
    gradient or, in a run whose tensors changed, did not exist. `numels` has the sizes, and `grid("norm")` one statistic
    of all tensors as an array [rows, tensors] in the order of iteration.
    """

    def __init__(self, parts: Sequence[tuple[RowHeader, np.ndarray]]) -> None:
        self._parts = parts
        self._places = [{name: at for at, name in enumerate(header.names)} for header, _ in parts]
        self.numels: dict[str, int] = {}
        for header, _ in parts:
            self.numels.update(zip(header.names, header.numels, strict=True))
        self.stats = tuple(dict.fromkeys(stat for header, _ in parts for stat in header.stats))
        self.steps = _joined([rows["step"] for _, rows in parts], np.int64)
        self.attempts = _joined([rows["attempt"] for _, rows in parts], np.int64)

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
        if stat not in self.stats:
            raise KeyError(f"no statistic {stat!r}; there are {', '.join(self.stats) or 'none'}")
        return _joined([self._values(part, list(self), stat) for part in range(len(self._parts))])

    def column(self, name: str, stat: str) -> np.ndarray:
        if stat not in self.stats:
            raise KeyError(f"no statistic {stat!r}; there are {', '.join(self.stats) or 'none'}")
        return _joined([self._values(part, [name], stat)[:, 0] for part in range(len(self._parts))])

    def _values(self, part: int, names: Sequence[str], stat: str) -> np.ndarray:
        (header, rows), places = self._parts[part], self._places[part]
        values = np.full((len(rows), len(names)), np.nan, np.float32)
        known = [(to, places[name]) for to, name in enumerate(names) if name in places]
        if known and stat in header.stats:
            to, at = (list(side) for side in zip(*known, strict=True))
            found = rows["stats"][:, at, header.stats.index(stat)]
            if "nonfinite" in header.stats:
                absent = rows["stats"][:, at, header.stats.index("nonfinite")] == -1
                found = np.where(absent, np.float32(np.nan), found)
            values[:, to] = found
        return values


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

"""Builds a table from numbers in memory: sequences, mappings, data frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.missing_values import drop_padding
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable, TableBuilder

_WAY_OUT = "Pass a path, a sequence of losses, or a mapping of names to sequences of one number a step"


def table_from_arrays(source: Any) -> LogTable:
    """A table from a sequence of losses, a mapping of names to sequences, records, or a data frame."""
    gather = TableBuilder()
    if isinstance(source, Mapping):
        columns = {str(name): list(values) for name, values in source.items() if isinstance(values, Iterable)}
    elif hasattr(source, "columns") and hasattr(source, "__getitem__"):  # a data frame of any library
        columns = {str(name): list(source[name]) for name in source.columns}
    elif isinstance(source, Iterable) and not isinstance(source, str | bytes):
        values = list(source)
        if values and all(isinstance(value, Mapping) for value in values):
            for record in values:
                gather.add({str(name): _number(value) for name, value in record.items() if _is_number(value)})
            return gather.build("arrays", "")
        columns = {"loss": values}
    else:
        raise UnreadableInput(f"a {type(source).__name__} is not a log. {_WAY_OUT}")
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        lengths_by_name = ", ".join(f"{name}: {len(values)}" for name, values in columns.items())
        raise UnreadableInput(f"the sequences differ in length ({lengths_by_name}). {_WAY_OUT}")
    present = {name: np.array([value is not None for value in values], dtype=bool) for name, values in columns.items()}
    gather.extend({name: _numbers(values, name) for name, values in columns.items()}, present)
    return drop_padding(gather.build("arrays", ""))


def _numbers(values: list[Any], name: str) -> NDArray[np.float64]:
    try:
        return np.array([_number(value) for value in values], dtype=np.float64)
    except (TypeError, ValueError):
        raise UnreadableInput(f"{name} contains a value that is not a number. {_WAY_OUT}") from None


def _is_number(value: Any) -> bool:
    try:
        return value is not None and isinstance(_number(value), float)
    except (TypeError, ValueError):
        return False


def _number(value: Any) -> float:
    """A float from a number or a one-element tensor; None (missing) becomes NaN."""
    return float("nan") if value is None else float(value)

"""Where a sample comes from, in words: the file and line of a text, the tokens of a file, the row of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

_MAX_SHOWN = 3
"""Texts of one sample that are named."""


@runtime_checkable
class KnowsSources(Protocol):
    """A data set that can say where a sample comes from."""

    def source_of(self, index: int) -> str: ...


def source_in(dataset: object, index: int) -> str:
    """The source of a sample; empty where the data set does not know it. Never raises."""
    try:
        if isinstance(dataset, Subset):
            row = int(dataset.indices[index])
            return source_in(dataset.dataset, row) or f"row {row}"
        return str(dataset.source_of(index)) if isinstance(dataset, KnowsSources) else ""
    except Exception:  # of a user's data set; a name is not worth a run
        return ""


@dataclass(frozen=True, slots=True)
class TextSources:
    """File and line of each text of a store."""

    files: tuple[Path, ...]
    places: NDArray[Any]
    """[texts, 2]: the number of the file, and the line; 0 where the whole file is one text."""

    def describe(self, texts: Sequence[int]) -> str:
        """Such as `a.jsonl:12`, or `a.jsonl:12 to 15` for texts that follow one another in a file."""
        known = [int(text) for text in texts if text < len(self.places)]
        shown = [self._one(text) for text in known[:_MAX_SHOWN]]
        if len(known) > 1 and known == [*range(known[0], known[-1] + 1)]:
            (file, line), (last_file, last_line) = self.places[known[0]], self.places[known[-1]]
            if file == last_file and line:
                return f"{self.files[int(file)]}:{line} to {last_line}"
        more = f" and {len(known) - _MAX_SHOWN} more texts" if len(known) > _MAX_SHOWN else ""
        return ", ".join(dict.fromkeys(shown)) + more

    def _one(self, text: int) -> str:
        file, line = self.places[text]
        return f"{self.files[int(file)]}:{line}" if line else str(self.files[int(file)])


def text_places(places: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
    return np.array(places, np.int32).reshape(-1, 2)

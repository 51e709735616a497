"""The normal level and noise of a number, learnt from accepted values only, and the best level it ever had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ONE_SIGMA = 0.84
"""Share of normal numbers that are less than a deviation above their mean."""
MIN_ERRORS = 6
MAD_TO_SIGMA = 1.4826
"""A median absolute deviation of normal noise, as a standard deviation."""
MEDIAN_ERROR = 1.25
"""Standard error of a median, relative to that of a mean."""
MIN_STRETCH = 32
"""Fewest values from which a level and its noise are learnt."""
MAX_STRETCH = 4096
STRETCH_SHARE = 1 / 64
"""A stretch is this share of the run so far, so that a long run costs no more than a short one."""
GROUP = 32
"""Values whose median is a level of its own, and whose mean shows how far noise is correlated."""
MAX_MEMORY = 8.0
REMEMBERED = 7
"""Stretches whose typical noise is the noise."""
REMEMBERED_ERRORS = 64
"""Groups whose distance from the level that was expected of them is the wander."""
MAX_BLOCKS = 128
"""Blocks of the level history; when there are more, neighbours merge."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some successive values, summed up."""

    level: float
    noise: float
    memory: float
    """How many values carry as much news as one independent value."""


def sum_up(values: Floats, recent: Floats) -> Stretch:
    """The level of the recent values, and the noise of all of them."""
    half = len(values) // 2
    low, high = float(np.median(values[:half])), float(np.median(values[half:]))
    apart = values - np.linspace(low - (high - low) / 2, high + (high - low) / 2, len(values))
    # Differences of neighbours, as the bend of a fast falling loss is not noise.
    noise = MAD_TO_SIGMA * float(np.median(np.abs(np.diff(values)))) / float(np.sqrt(2))
    return Stretch(float(np.median(recent)), noise, _memory(apart, noise))


def _memory(apart: Floats, noise: float) -> float:
    """How much wider the means of groups are than those of independent noise."""
    group = min(GROUP, len(apart) // 8)
    if group < 4 or noise <= 0:
        return 1.0
    calm = np.clip(apart, -3 * noise, 3 * noise)
    means = calm[: len(calm) // group * group].reshape(-1, group).mean(axis=1)
    spread = float(calm.var())
    return min(max(group * float(means.var()) / spread, 1.0), MAX_MEMORY) if spread > 0 else 1.0


class LevelBaseline:
    """Level, noise and memory of a number; it never learns a value that was not accepted.

    `learn(values)` moves the level that changes are measured against; `accept(row, values)` also makes them part of the
    history from which the best level is taken.
    """

    def __init__(self, min_noise: float) -> None:
        self.min_noise = min_noise
        self.level = float("nan")
        self.noise = min_noise
        self.memory = 1.0
        self.wander = min_noise
        """How far the level of a few values usually is from the level that was expected."""
        self.history = LevelHistory()
        self._stretches: list[Stretch] = []
        self.last: Floats = np.empty(0)
        """The last values learnt from."""
        self._errors: Floats = np.empty(0)

    @property
    def known(self) -> bool:
        return not np.isnan(self.level)

    def learn(self, values: Floats) -> None:
        """Take the level of these values as the present one."""
        recent = values[-max(MIN_STRETCH, len(values) // 2) :]
        if len(recent) < MIN_STRETCH:
            recent = np.concatenate([self.last, recent])[-MIN_STRETCH:]
        if self.known and len(values) >= MIN_STRETCH:
            self._note_errors(values)
        stretch = sum_up(values, recent)
        self._stretches = [*self._stretches[1 - REMEMBERED :], stretch]
        self.level = stretch.level
        self.noise = max(float(np.median([one.noise for one in self._stretches])), self.min_noise)
        self.memory = float(np.median([one.memory for one in self._stretches]))
        self._measure_wander(len(recent))
        self.last = values[-MIN_STRETCH:]

    def _note_errors(self, values: Floats) -> None:
        whole = values[: len(values) // GROUP * GROUP].reshape(-1, GROUP)
        if len(whole) > REMEMBERED_ERRORS // 4:
            whole = whole[:: -(-len(whole) // (REMEMBERED_ERRORS // 4))]
        errors = np.median(whole, axis=1) - self.level
        self._errors = np.concatenate([self._errors, errors])[-REMEMBERED_ERRORS:]

    def _measure_wander(self, recent: int) -> None:
        """From the errors upwards, as a loss that falls is no wander; at least what the noise alone explains."""
        least = float(np.hypot(self.error_of(GROUP), self.error_of(recent)))
        seen = float(np.quantile(self._errors, ONE_SIGMA)) if len(self._errors) >= MIN_ERRORS else 0.0
        self.wander = max(least, seen)

    def accept(self, row: int, values: Floats) -> None:
        """Learn these values and keep them in the history."""
        self.learn(values)
        self.history.add(row, values)

    def forget_level(self) -> None:
        """What comes now is not near the level: wait for enough values to learn another."""
        self.level = float("nan")
        self.last = np.empty(0)

    def error_of(self, count: int) -> float:
        """Standard error of the median of so many values."""
        return MEDIAN_ERROR * self.noise * float(np.sqrt(self.memory / max(count, 1)))

    def stretch_length(self, rows: int) -> int:
        """How many values to learn from at once, after so many rows."""
        return int(min(max(MIN_STRETCH, rows * STRETCH_SHARE, 16 * self.memory), MAX_STRETCH))

    def state_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "level": self.level,
            "noise": self.noise,
            "memory": self.memory,
            "wander": self.wander,
            "last": self.last.tolist(),
            "errors": self._errors.tolist(),
            "stretches": [[one.level, one.noise, one.memory] for one in self._stretches],
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level, self.noise = float(state["level"]), float(state["noise"])
        self.memory, self.wander = float(state["memory"]), float(state["wander"])
        self.last, self._errors = np.array(state["last"], float), np.array(state["errors"], float)
        self._stretches = [Stretch(*one) for one in state["stretches"]]
        self.history.load_state_dict(state["history"])


class LevelHistory:
    """Levels of successive blocks of accepted values, in bounded memory: when it is full, neighbours merge."""

    def __init__(self) -> None:
        self.block = MIN_STRETCH
        """Values in one block."""
        self.rows: list[int] = []
        """The first row of each block."""
        self.levels: list[float] = []
        self._waiting: Floats = np.empty(0)
        self._waiting_row = 0

    def add(self, row: int, values: Floats) -> None:
        if not len(self._waiting):
            self._waiting_row = row
        values = np.concatenate([self._waiting, values])
        first = row - len(self._waiting)
        whole = len(values) // self.block * self.block
        if whole:
            levels = np.median(values[:whole].reshape(-1, self.block), axis=1)
            rows = range(first, first + whole, self.block)
            self.rows += [self._waiting_row, *rows[1:]]
            self.levels += levels.tolist()
            self._waiting_row = first + whole
        self._waiting = values[whole:]
        while len(self.levels) > MAX_BLOCKS:
            self._merge()

    def _merge(self) -> None:
        even = len(self.levels) // 2 * 2
        levels = np.asarray(self.levels[:even]).reshape(-1, 2).mean(axis=1).tolist()
        if even < len(self.levels):  # half a block: wait for its other half, as if its values were all at its level
            self._waiting = np.concatenate([np.full(self.block, self.levels[-1]), self._waiting])
            self._waiting_row = self.rows[-1]
        self.rows, self.levels, self.block = self.rows[:even:2], levels, 2 * self.block

    def state_dict(self) -> dict[str, Any]:
        waiting = {"waiting": self._waiting.tolist(), "waiting_row": self._waiting_row}
        return {"block": self.block, "rows": list(self.rows), "levels": list(self.levels), **waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.block, self.rows, self.levels = int(state["block"]), list(state["rows"]), list(state["levels"])
        self._waiting, self._waiting_row = np.array(state["waiting"], float), int(state["waiting_row"])

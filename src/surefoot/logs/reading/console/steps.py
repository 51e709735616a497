"""Where in the run a row stands, put together from counters that stand on the line, before it, or on a bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.reading.console.shapes import COUNT, TOTAL, LineShape
from surefoot.logs.reading.meaning import MetricRole, parse_metric_name

Floats = NDArray[np.float64]
_Number = TypeVar("_Number", float, Floats)


class StepTracker:
    """The counters last seen."""

    def __init__(self) -> None:
        self.position: dict[str, float] = {}
        """Counters of the last row or heading that had any."""
        self.bar = (0.0, 0.0)
        """The state of the longest bar, and its end."""
        self.settings: dict[str, float | str] = {}
        """What the counters count up to."""
        self._base: float | None = None

    def epochs(self) -> dict[str, float]:
        return {name: at for name, at in self.position.items() if parse_metric_name(name).role is MetricRole.EPOCH}

    def epochs_done(self) -> float:
        """How many epochs were done before the present one."""
        return next((at - self.first_epoch(at) for at in self.epochs().values()), 0.0)

    def first_epoch(self, epoch: float) -> float:
        """Epochs are numbered from 0 or from 1."""
        if self._base is None:
            self._base = 0.0 if epoch < 1 else 1.0
        return self._base

    def resolve_totals(self, values: dict[str, _Number]) -> None:
        """What a counter counts up to is a fact; a share such as 9800/10000 is a number."""
        for hidden in [name for name in values if name.startswith(f"{TOTAL} ")]:
            total = values.pop(hidden)
            name = hidden[len(TOTAL) + 1 :]
            role = parse_metric_name(name).role
            if role is MetricRole.STEP:
                self.settings["max_steps"] = float(np.max(total))
            elif role is MetricRole.EPOCH:
                self.settings["epochs"] = float(np.max(total))
            elif np.all(total != 0):
                values[name] = values[name] / total

    def resolve_count(self, shape: LineShape, values: dict[str, _Number]) -> None:
        """Steps for rows with an unnamed counter such as 10/300."""
        count, total = values.pop(COUNT, None), values.pop(TOTAL, None)
        if count is None or total is None or shape.has_steps or shape.is_eval:
            return
        epoch = values[shape.epoch] if shape.epoch else None
        if epoch is None:
            epoch = next(iter(self.epochs().values()), None)
        if epoch is None:
            values["step"] = self._passed(shape, count, total)
        elif np.any(np.asarray(epoch) % 1):
            values["step"] = count  # a share of an epoch: the counter is the run's
        else:
            values["step"] = (epoch - self.first_epoch(float(np.min(epoch)))) * total + count

    def _passed(self, shape: LineShape, count: _Number, total: _Number) -> _Number:
        """A counter that begins anew with every bar counts on."""
        counts, totals = np.atleast_1d(count), np.atleast_1d(total)
        before = np.concatenate([[shape.count], counts[:-1]])
        again = (counts < before) & (before >= 0.9 * totals)
        passed = shape.steps_before + np.cumsum(again * totals)
        shape.count, shape.steps_before = float(counts[-1]), float(passed[-1])
        return cast("_Number", count + passed if isinstance(count, np.ndarray) else float(count + passed[0]))

    def fill_position(self, shape: LineShape, values: dict[str, float], *, evaluation: bool = False) -> None:
        """A row without counters of its own takes those before it: an evaluation all, others the epoch."""
        if shape.has_steps or "step" in values:
            return
        if (shape.is_eval or evaluation) and not shape.epoch:
            values.update(self.position)
        elif not shape.has_counter:
            values.update(self.epochs())
        elif shape.epoch and self.bar[1] and values[shape.epoch] % 1:
            values["step"] = self.bar[0]

    def update_position(self, values: Mapping[str, float]) -> None:
        place = {name: value for name, value in values.items() if parse_metric_name(name).role in (MetricRole.STEP, MetricRole.EPOCH)}
        if place:
            self.position = {**self.epochs(), **place}

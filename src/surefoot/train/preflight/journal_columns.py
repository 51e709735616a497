"""Columns of a trial's journal, as the checks need them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from surefoot.journal.reader import Run

Floats = NDArray[np.float64]


def applied(run: Run, column: str) -> Floats:
    """One value per applied update; after a rewind the last value of each step."""
    if not run.scalars.rows:
        return np.empty(0)
    return np.asarray(run.scalars[column], np.float64)[_last_of_each_step(run)]


def applied_steps(run: Run) -> NDArray[np.int64]:
    """The steps of the values of `applied`."""
    if not run.scalars.rows:
        return np.empty(0, np.int64)
    return np.asarray(run.scalars["step"], np.int64)[_last_of_each_step(run)]


def attempted(run: Run, column: str) -> Floats:
    """One value per attempted update; NaN where it was not measured."""
    return np.asarray(run.scalars[column], np.float64) if run.scalars.rows else np.empty(0)


def later_half(values: Floats) -> Floats:
    """The later half of the finite values: the first updates of a run are not typical."""
    known = values[np.isfinite(values)]
    return known[len(known) // 2 :]


def _last_of_each_step(run: Run) -> NDArray[np.int64]:
    chosen = (np.asarray(run.scalars["verdict"]) == 0) & (np.asarray(run.scalars["optimizer"]) == 0)
    indices = {int(run.scalars["step"][i]): int(i) for i in np.flatnonzero(chosen)}
    return np.array([indices[step] for step in sorted(indices)], np.int64)

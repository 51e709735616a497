"""The rows of a trial's journal as the answers need them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from surefoot.journal.reader import Run

Numbers = NDArray[np.float64]


def landed(run: Run, name: str) -> Numbers:
    """One value for each update that landed; where the run went back, of the last time it was made."""
    if not run.scalars.rows:
        return np.empty(0)
    chosen = _newest(run)
    return np.asarray(run.scalars[name], np.float64)[chosen]


def steps(run: Run) -> NDArray[np.int64]:
    """The updates that `landed` has values for."""
    return np.asarray(run.scalars["step"], np.int64)[_newest(run)] if run.scalars.rows else np.empty(0, np.int64)


def every(run: Run, name: str) -> Numbers:
    """One value for each update that was tried, NaN where it was not measured."""
    return np.asarray(run.scalars[name], np.float64) if run.scalars.rows else np.empty(0)


def settled(values: Numbers) -> Numbers:
    """The later half of what is known: the first updates of a run are like no others."""
    known = values[np.isfinite(values)]
    return known[len(known) // 2 :]


def _newest(run: Run) -> NDArray[np.int64]:
    first = (np.asarray(run.scalars["verdict"]) == 0) & (np.asarray(run.scalars["optimizer"]) == 0)
    places = {int(run.scalars["step"][at]): int(at) for at in np.flatnonzero(first)}
    return np.array([places[step] for step in sorted(places)], np.int64)

"""Gradient flow: the norm of every layer now, and over the run as a grid of layers and steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from surefoot.journal.pyramid import MAX, NONFINITE
from surefoot.journal.pyramid_reader import PyramidReader
from surefoot.watch.live_run import LiveRun

_HISTORY = 64
"""Buckets of the whole run for the highest norm of each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFlow:
    """One value per layer, in the order of the model's parameters: input first."""

    names: tuple[str, ...]
    norms: np.ndarray
    """Of the newest row; NaN where there was no gradient or it was not finite."""
    nonfinite: np.ndarray
    """Whether the newest row is not finite."""
    highest: np.ndarray
    """Over the run."""
    nonfinite_ever: np.ndarray
    """Rows of the run that were not finite."""
    low: float
    high: float
    shares: np.ndarray
    """Between `low` and `high` on a log scale, 0 to 1; NaN where unknown."""


def layer_flow(run: LiveRun) -> LayerFlow | None:
    """The gradient flow now; None for a run without per-layer rows."""
    reader = run.layers
    if not reader.names or reader.last_attempt < 0 or not reader.segments:
        return None
    newest = reader.rows(None, int(reader.segments[-1].rows["attempt"][-1]), 1 << 62)[-1:]
    history = reader.buckets(None, 0, reader.last_attempt, _HISTORY)
    norms = newest["stats"][0, :, MAX].astype(np.float64)
    with np.errstate(all="ignore"):
        logs = np.log10(np.where(norms > 0, norms, np.nan))
    known = logs[np.isfinite(logs)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    low, high = (low, high) if high - low >= 0.5 else ((low + high) / 2 - 0.25, (low + high) / 2 + 0.25)
    return LayerFlow(
        names=reader.names,
        norms=norms,
        nonfinite=newest["stats"][0, :, NONFINITE] > 0,
        highest=np.fmax.reduce(history["stats"][..., MAX], axis=0),
        nonfinite_ever=history["stats"][..., NONFINITE].sum(axis=0),
        low=10**low,
        high=10**high,
        shares=(logs - low) / (high - low),
    )


@dataclass(frozen=True, slots=True)
class FlowGrid:
    """The highest gradient norm of each layer in each bucket of attempts, and how many rows were not finite."""

    firsts: np.ndarray
    lasts: np.ndarray
    norms: np.ndarray
    """[buckets, layers]"""
    nonfinite: np.ndarray


def flow_grid(reader: PyramidReader, first: int, last: int, max_buckets: int) -> FlowGrid:
    """The grid of these attempts: single rows where all were kept and there is room for them, else buckets."""
    kept = reader.rows_between(first, last)
    expected = min(last, reader.last_attempt) - max(first, 0) + 1
    complete = 0 < kept <= max_buckets and kept >= expected
    entries = reader.rows(None, first, last) if complete else reader.buckets(None, first, last, max_buckets)
    stats = entries["stats"]
    return FlowGrid(entries["first"], entries["attempt"], stats[..., MAX], stats[..., NONFINITE])

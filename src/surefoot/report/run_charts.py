"""The curves of a run for its report, over attempts, which only grow: loss, gradient norm, learning rate, speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from surefoot.journal.reader import Run
from surefoot.logs.report.axes import choose_scale, nonfinite_spans
from surefoot.logs.report.panels import Panel
from surefoot.logs.run_curves import Floats, Series
from surefoot.records import Verdict
from surefoot.story.incident_story import IncidentLevel, IncidentStory

MAX_POINTS = 2400
"""Points drawn per curve, at most."""
_SPEED_WINDOW = 15
"""Rows whose median is the speed that is drawn: single steps scatter."""


def chart_panels(run: Run) -> list[Panel]:
    """The panels that have something to draw, the loss first."""
    speed_name, speed = _speed(run)
    panels = (
        ("loss", [_series(run, "loss", refused_nan=True), _series(run, "eval_loss")]),
        ("gradient norm", [replace(_series(run, "norm", refused_nan=True), name="gradient norm")]),
        ("learning rate", [replace(_series(run, "lr"), name="learning rate")]),
        (speed_name, [speed]),
    )
    drawn = [(title, [s for s in series if len(s)]) for title, series in panels]
    return [_panel(title, series) for title, series in drawn if any(np.isfinite(s.values).any() for s in series)]


def _series(run: Run, column: str, *, refused_nan: bool = False) -> Series:
    """One column; NaN means unknown, unless the update was refused for it."""
    if not run.scalars.rows or column not in run.scalars:
        return Series(column, np.empty(0), np.empty(0))
    values = np.asarray(run.scalars[column], np.float64)
    keep = ~np.isnan(values)
    if refused_nan:
        keep |= np.asarray(run.scalars["verdict"]) == Verdict.NONFINITE
    return Series(column, np.asarray(run.scalars["attempt"], np.float64)[keep], values[keep])


def _speed(run: Run) -> tuple[str, Series]:
    """Tokens, samples or steps a second, whichever is known."""
    seconds = _column(run, "seconds")
    for column, title in (("tokens", "tokens/s"), ("samples", "samples/s"), ("", "steps/s")):
        amount = _column(run, column) if column else np.ones(len(seconds))
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.where(seconds > 0, amount / seconds, np.nan)
        known = np.isfinite(rate)
        if known.any():
            attempts = np.asarray(run.scalars["attempt"], np.float64)[known]
            return title, Series(title, attempts, _rolling_median(rate[known]))
    return "steps/s", Series("steps/s", np.empty(0), np.empty(0))


def _column(run: Run, name: str) -> Floats:
    known = run.scalars.rows and name in run.scalars
    return np.asarray(run.scalars[name], np.float64) if known else np.full(run.scalars.rows, np.nan)


def _rolling_median(values: Floats) -> Floats:
    if len(values) < _SPEED_WINDOW:
        return values
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(values, _SPEED_WINDOW // 2, "edge"), _SPEED_WINDOW)
    return np.median(windows, axis=1)


def _panel(title: str, series: Sequence[Series]) -> Panel:
    drawn = [Series(s.name, s.steps[kept], s.values[kept]) for s in series for kept in [kept_points(s.values)]]
    spans = nonfinite_spans(drawn[0].steps, drawn[0].values)
    scale = choose_scale([s.values for s in drawn], linear=title == "learning rate")
    return Panel(title, tuple(drawn), scale, tuple(spans), tuple(range(len(drawn))), "NaN")


def kept_points(values: Floats, most: int = MAX_POINTS) -> NDArray[np.int64]:
    """Indices of the points to draw: of each bucket the lowest, the highest, and the first that is not finite."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    size = math.ceil(3 * count / most)
    buckets = math.ceil(count / size)
    padded = np.concatenate([values, np.full(buckets * size - count, values[-1])]).reshape(buckets, size)
    finite = np.isfinite(padded)
    low = np.where(finite, padded, np.inf).argmin(1)
    high = np.where(finite, padded, -np.inf).argmax(1)
    bad = np.where(finite.all(1), low, (~finite).argmax(1))
    index = np.stack([low, high, bad], 1) + np.arange(0, buckets * size, size)[:, None]
    return np.unique(np.minimum(np.concatenate([index.ravel(), [0, count - 1]]), count - 1))


def chart_marks(incidents: Sequence[IncidentStory]) -> list[tuple[float, str]]:
    """Where the incidents that are not only reported began, with their numbers in the list."""
    return [
        (float(incident.attempt), str(number))
        for number, incident in enumerate(incidents, 1)
        if incident.level is not IncidentLevel.REPORTED
    ]

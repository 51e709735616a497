"""The panels of a plot, whatever draws it: loss, gradient norm, learning rate, loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.logs.log_diagnosis import LogDiagnosis
from surefoot.logs.report.axes import AxisScale, choose_scale, nonfinite_spans, step_range, thin_points
from surefoot.logs.report.wording import clean
from surefoot.logs.run_curves import RunCurves, Series

MAX_DRAWN_POINTS = 2000
"""Points drawn per series; of more, the lowest and the highest of each bucket."""
_RUN_COLOURS = {"A": 0, "B": 1}


@dataclass(frozen=True, slots=True)
class Panel:
    """Series that share an axis."""

    title: str
    series: tuple[Series, ...]
    """Thinned, with their labels as names."""
    scale: AxisScale
    nonfinite: tuple[tuple[float, float], ...]
    """Step ranges with non-finite values: of the first series, or of the second if only that has any."""
    colours: tuple[int, ...] = ()
    """Colour index of each series: the same for a run in all panels."""
    nonfinite_label: str = "NaN"

    def nonfinite_label_at(self, edges: tuple[float, float]) -> float | None:
        """The middle of the widest non-finite range, if there is room for a label."""
        first, last = max(self.nonfinite, key=lambda bounds: bounds[1] - bounds[0], default=(0.0, 0.0))
        return (first + last) / 2 if last - first > 0.06 * (edges[1] - edges[0]) else None


def run_panels(curves: RunCurves) -> list[Panel]:
    """The panels of a run that have something to draw, the loss first."""
    return runs_panels([(None, curves)])


def runs_panels(runs: Sequence[tuple[str | None, RunCurves]]) -> list[Panel]:
    """The panels of several runs in one plot, each under its label."""
    panels: list[Panel] = []
    alone = len(runs) == 1
    for title, roles in (
        ("loss", ("loss", "eval_loss") if alone else ("loss",)),
        ("evaluation loss", () if alone else ("eval_loss",)),
        ("gradient norm", ("grad_norm",)),
        ("learning rate", ("lr",)),
        ("loss scale", ("loss_scale",)),
    ):
        whole = [(label, getattr(curves, role)) for label, curves in runs for role in roles]
        drawable = [(label, series) for label, series in whole if np.isfinite(series.values).any()]
        if drawable or (title == "loss" and any(len(series) for _, series in whole)):
            all_series = [(label, series) for label, series in whole if len(series)]
            panels.append(_panel(title, all_series))
    return panels


def _panel(title: str, all_series: Sequence[tuple[str | None, Series]]) -> Panel:
    drawn: list[Series] = []
    for label, series in all_series:
        steps, values = thin_points(series.steps, series.values, MAX_DRAWN_POINTS)
        name = clean(series.name, 40) or title
        drawn.append(Series(name if label is None else f"{label}: {name}", steps, values))
    labels = [label for label, _ in all_series]
    alone = labels[0] is None
    bad, word = _nonfinite_label(drawn) if alone else ([], "")
    inks = tuple(range(len(drawn)) if alone else (_RUN_COLOURS.get(label or "", 2) for label in labels))
    straight = title == "learning rate"  # on a log scale a decay to 0 looks like a cliff
    scale = choose_scale([series.values for series in drawn], linear=straight)
    return Panel(title, tuple(drawn), scale, tuple(bad), inks, word)


def _nonfinite_label(drawn: Sequence[Series]) -> tuple[list[tuple[float, float]], str]:
    """Non-finite ranges, and their label."""
    for number, series in enumerate(drawn):
        if spans := nonfinite_spans(series.steps, series.values):
            return spans, "NaN" if number == 0 else f"{series.name} is NaN"
    return [], ""


def step_limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """First and last step of all panels, with a margin if there is only one step."""
    first, last = step_range([series.steps for panel in panels for series in panel.series])
    return (first, last) if last > first else (first - 1, last + 1)


def onset_of(diagnosis: LogDiagnosis) -> float | None:
    return None if diagnosis.onset_step is None else float(diagnosis.onset_step)

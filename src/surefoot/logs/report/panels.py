"""Which panels a picture of a run has, whatever draws it: loss, gradient norm, rate, scale, where they were logged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.logs.log_diagnosis import LogDiagnosis
from surefoot.logs.report.axes import AxisScale, choose_scale, nonfinite_spans, step_range, thin_points
from surefoot.logs.report.wording import clean
from surefoot.logs.run_curves import RunCurves, Series

MAX_DRAWN_POINTS = 2000
"""Points drawn of one trace; of more, the lowest and the highest of each bucket."""
_RUN_COLOURS = {"A": 0, "B": 1}


@dataclass(frozen=True, slots=True)
class Panel:
    """Traces that share an axis."""

    title: str
    series: tuple[Series, ...]
    """Thinned, with the labels to show as names."""
    scale: AxisScale
    nonfinite: tuple[tuple[float, float], ...]
    """From which step to which there were no numbers: in the first trace, or in the second if in that alone."""
    colours: tuple[int, ...] = ()
    """Which of the colours each trace has: the same for a run in all panels."""
    nonfinite_label: str = "NaN"

    def nonfinite_label_at(self, edges: tuple[float, float]) -> float | None:
        """The middle of the widest stretch without numbers, if there is room to write something there."""
        first, last = max(self.nonfinite, key=lambda one: one[1] - one[0], default=(0.0, 0.0))
        return (first + last) / 2 if last - first > 0.06 * (edges[1] - edges[0]) else None


def run_panels(course: RunCurves) -> list[Panel]:
    """The panels that there is something to draw in, the loss first."""
    return runs_panels([(None, course)])


def runs_panels(courses: Sequence[tuple[str | None, RunCurves]]) -> list[Panel]:
    """The same for several runs in one picture, each under its label."""
    made: list[Panel] = []
    alone = len(courses) == 1
    for title, roles in (
        ("loss", ("loss", "eval_loss") if alone else ("loss",)),
        ("evaluation loss", () if alone else ("eval_loss",)),
        ("gradient norm", ("grad_norm",)),
        ("learning rate", ("lr",)),
        ("loss scale", ("loss_scale",)),
    ):
        whole = [(label, getattr(course, role)) for label, course in courses for role in roles]
        there = [(label, trace) for label, trace in whole if np.isfinite(trace.values).any()]
        if there or (title == "loss" and any(len(trace) for _, trace in whole)):
            traces = [(label, trace) for label, trace in whole if len(trace)]
            made.append(_panel(title, traces))
    return made


def _panel(title: str, traces: Sequence[tuple[str | None, Series]]) -> Panel:
    drawn: list[Series] = []
    for label, trace in traces:
        steps, values = thin_points(trace.steps, trace.values, MAX_DRAWN_POINTS)
        name = clean(trace.name, 40) or title
        drawn.append(Series(name if label is None else f"{label}: {name}", steps, values))
    labels = [label for label, _ in traces]
    alone = labels[0] is None
    bad, word = _nonfinite_label(drawn) if alone else ([], "")
    inks = tuple(range(len(drawn)) if alone else (_RUN_COLOURS.get(label or "", 2) for label in labels))
    straight = title == "learning rate"  # a decay to nothing looks like a fall off a cliff on a log scale
    scale = choose_scale([trace.values for trace in drawn], linear=straight)
    return Panel(title, tuple(drawn), scale, tuple(bad), inks, word)


def _nonfinite_label(drawn: Sequence[Series]) -> tuple[list[tuple[float, float]], str]:
    """Where there are no numbers, and the word for it."""
    for number, trace in enumerate(drawn):
        if found := nonfinite_spans(trace.steps, trace.values):
            return found, "NaN" if number == 0 else f"{trace.name} is NaN"
    return [], ""


def step_limits(made: Sequence[Panel]) -> tuple[float, float]:
    """First and last step of all panels, with a little room where there is but one."""
    first, last = step_range([trace.steps for panel in made for trace in panel.series])
    return (first, last) if last > first else (first - 1, last + 1)


def onset_of(answer: LogDiagnosis) -> float | None:
    return None if answer.onset_step is None else float(answer.onset_step)

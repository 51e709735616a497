"""Draws a run as SVG text without any library; colours and sizes come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from surefoot.logs.report.axes import AxisScale
from surefoot.logs.report.panels import Panel, step_limits
from surefoot.logs.report.wording import format_count, format_value
from surefoot.logs.run_curves import Series

WIDE, LEFT, RIGHT = 760, 88, 14
TALL, LOW, BETWEEN, BELOW = 230, 90, 36, 34
CROSS = "\N{MULTIPLICATION SIGN}"
"""Marks a non-finite value."""
MIN_SHADED, MAX_CROSSES = 6, 60
"""Stretches of non-finite values narrower than this get a cross, unless they are many."""


def draw_svg(
    panels: Sequence[Panel],
    *,
    title: str,
    onset: float | None = None,
    onset_label: str = "began",
    unit: str = "step",
    style: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """The panels above one another as one `<svg>` element; empty if there is nothing to draw.

    `style` is embedded, for a picture that stands alone. `marks` are further places on the step axis, with labels.
    """
    if not panels:
        return ""
    across = _StepAxis(*step_limits(panels))
    parts: list[str] = []
    top = BETWEEN
    for number, panel in enumerate(panels):
        tall = TALL if number == 0 else LOW
        parts += _marks(marks, across, top, tall, labelled=number == 0)
        parts += _panel(panel, across, top, tall, onset=onset, word=onset_label if number == 0 else "")
        top += tall + BETWEEN
    parts += _step_axis(across, top - BETWEEN, unit)
    height = top - BETWEEN + BELOW + 10
    head = f'<svg viewBox="0 0 {WIDE} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
    head += f"<style>{style}</style>" if style else ""
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"


class _StepAxis:
    """Maps steps to x positions."""

    def __init__(self, first: float, last: float) -> None:
        self.first, self.last = first, last

    def __call__(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first)
        return LEFT + min(1.0, max(0.0, share)) * (WIDE - LEFT - RIGHT)


def _marks(
    marks: Sequence[tuple[float, str]], across: _StepAxis, top: int, tall: int, *, labelled: bool
) -> Iterator[str]:
    """A line at each mark; in the first panel with its label, a label on top of another one left out."""
    free_from = 0.0
    for step, label in sorted(marks):
        x = across(step)
        yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + tall}"/>'
        if labelled and x >= free_from:
            anchor = f'x="{x:.1f}" y="{top - 2}" text-anchor="middle"'
            yield f'<text class="annotation" {anchor}>{escape(label)}</text>'
            free_from = x + 9.0 * (1 + len(label))


def _panel(panel: Panel, across: _StepAxis, top: int, tall: int, *, onset: float | None, word: str) -> Iterator[str]:
    """One panel; the first has the labels."""
    bottom, right = top + tall, WIDE - RIGHT
    yield from _heading(panel, top)
    for tick in panel.scale.ticks(4 if word else 2):
        y = _y_position(panel.scale, tick, top, tall)
        if top - 1 <= y <= bottom + 1:
            yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            label = escape(format_value(tick))
            yield f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    for start, end in panel.nonfinite:
        x = across(start)
        wide = max(across(end) - x, 1.5)
        yield f'<rect class="bad" x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{tall}"/>'
        if wide < MIN_SHADED and len(panel.nonfinite) <= MAX_CROSSES:  # too narrow to be seen
            where = f'x="{x + wide / 2:.1f}" y="{top + 14}" text-anchor="middle"'
            yield f'<text class="annotation" {where}>{CROSS}</text>'
    middle = panel.nonfinite_label_at((across.first, across.last)) if word else None
    if middle is not None:
        where = f'x="{across(middle):.1f}" y="{top + tall / 2:.0f}"'
        yield f'<text class="annotation" {where} text-anchor="middle">{escape(panel.nonfinite_label)}</text>'
    for ink, series in zip(panel.colours, panel.series, strict=True):
        yield from _line(series, panel.scale, across, top, tall, ink)
    if onset is not None:
        x = across(onset)
        yield f'<line class="onset" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
        if word:
            end = x > WIDE / 2
            where = f'x="{x + (-6 if end else 6):.1f}" y="{top + 13}" text-anchor="{"end" if end else "start"}"'
            yield f'<text class="annotation" {where}>{word} at {escape(format_count(onset))}</text>'


def _heading(panel: Panel, top: int) -> Iterator[str]:
    """The title, and the name of each line."""
    yield f'<text class="title" x="{LEFT}" y="{top - 10}">{escape(panel.title)}</text>'
    if [series.name for series in panel.series] == [panel.title]:
        return
    spans = "".join(
        f'<tspan class="ink{ink % 4}" dx="14">{escape(series.name)}</tspan>'
        for ink, series in zip(panel.colours, panel.series, strict=True)
    )
    yield f'<text class="name" x="{WIDE - RIGHT}" y="{top - 10}" text-anchor="end">{spans}</text>'


def _y_position(scale: AxisScale, value: float, top: int, tall: int) -> float:
    return top + (1 - float(scale.position(np.array([value]))[0])) * tall


def _line(series: Series, scale: AxisScale, across: _StepAxis, top: int, tall: int, number: int) -> Iterator[str]:
    """A line, broken at non-finite values; single points as dots."""
    places = top + (1 - scale.position(series.values)) * tall
    finite = np.isfinite(places) & np.isfinite(series.steps)
    kind = number % 4
    for piece in np.split(np.arange(len(places)), np.flatnonzero(np.diff(finite.astype(np.int8))) + 1):
        if not len(piece) or not finite[piece[0]]:
            continue
        points = [(across(float(series.steps[index])), float(places[index])) for index in piece]
        if len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline class="line line{kind}" points="{path}"/>'
        if len(points) == 1 or len(places) <= 60:
            yield "".join(f'<circle class="dot{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points)


def _step_axis(across: _StepAxis, bottom: int, unit: str) -> Iterator[str]:
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    ticks = AxisScale(across.first, across.last).ticks(5)
    for number, tick in enumerate(ticks):
        x = across(tick)
        anchor = "end" if x > WIDE - 60 else "middle"
        label = f"{unit} {format_count(tick)}" if number == 0 else format_count(tick)
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="{anchor}">{escape(label)}</text>'

"""Gradient flow: the norm of each layer's gradient from input to output on a log scale, as numbers and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from surefoot.journal.reader import Run
from surefoot.logs.report.axes import AxisScale
from surefoot.logs.report.svg_plot import CROSS
from surefoot.logs.report.wording import format_value
from surefoot.logs.run_curves import Floats

Bools = NDArray[np.bool_]
_WIDE, _LEFT, _RIGHT, _TOP, _TALL, _BELOW = 760, 88, 14, 36, 210, 34
_ROWS = 50
"""Rows whose median is drawn."""
MAX_LISTED = 400
"""Tensors in the table of the page."""


@dataclass(frozen=True, slots=True)
class FlowLine:
    """The norms of all tensors, in order from input to output, in one part of the run."""

    name: str
    norms: Floats
    """NaN where a tensor has no gradient, infinite where it is not finite."""


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """The tensors that were measured, and their norms early, late, and where the main incident began."""

    tensors: tuple[str, ...]
    lines: tuple[FlowLine, ...]


def gradient_flow(run: Run, at_attempt: int | None) -> GradientFlow | None:
    """The flow of a run; None if no layers were measured."""
    layers = run.layers
    if not layers.rows or "norm" not in layers.stats:
        return None
    grid = np.asarray(layers.grid("norm"), np.float64)
    names = tuple(layers)
    measured: Bools = np.logical_not(np.isnan(grid).all(axis=0))
    lines = [FlowLine("first steps", _median(grid[:_ROWS])), FlowLine("last steps", _median(grid[-_ROWS:]))]
    if at_attempt is not None:
        row = int(np.searchsorted(layers.attempts, at_attempt))
        if row < len(grid):
            lines.append(FlowLine(f"step {int(layers.steps[row]):,}", _with_nonfinite(run, grid[row], row)))
    kept = tuple(name for name, keep in zip(names, measured.tolist(), strict=True) if keep)
    return GradientFlow(kept, tuple(FlowLine(line.name, line.norms[measured]) for line in lines)) if kept else None


def _median(rows: Floats) -> Floats:
    known = np.isfinite(rows)
    result = np.full(rows.shape[1], np.nan)
    for column in np.flatnonzero(known.any(0)):
        result[column] = np.median(rows[known[:, column], column])
    return result


def _with_nonfinite(run: Run, norms: Floats, row: int) -> Floats:
    """A row in which tensors that have non-finite gradients are infinite."""
    if "nonfinite" not in run.layers.stats:
        return norms
    bad = np.asarray(run.layers.grid("nonfinite")[row]) > 0
    return np.where(bad, np.inf, norms)


def flow_svg(flow: GradientFlow) -> str:
    """The picture; its colours come from the page's style sheet."""
    values = np.concatenate([line.norms for line in flow.lines])
    above = values[np.isfinite(values) & (values > 0)]
    if not len(above):
        return ""
    low, high = 10.0 ** math.floor(math.log10(above.min())), 10.0 ** math.ceil(math.log10(above.max()) + 1e-9)
    scale = AxisScale(low, max(high, 10 * low), "log")
    height = _TOP + _TALL + _BELOW
    parts = [*_axes(flow, scale), *(part for k, line in enumerate(flow.lines) for part in _line(line, scale, k))]
    return (
        f'<svg viewBox="0 0 {_WIDE} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>gradient norm by layer</title>{''.join(parts)}</svg>"
    )


def _x(k: int, count: int) -> float:
    return _LEFT + 8 + (k / max(1, count - 1)) * (_WIDE - _LEFT - _RIGHT - 16)


def _axes(flow: GradientFlow, scale: AxisScale) -> Iterator[str]:
    right, bottom = _WIDE - _RIGHT, _TOP + _TALL
    yield f'<text class="title" x="{_LEFT}" y="{_TOP - 14}">gradient norm by tensor, from input to output</text>'
    spans = "".join(f'<tspan class="ink{k}" dx="14">{escape(line.name)}</tspan>' for k, line in enumerate(flow.lines))
    yield f'<text class="name" x="{right}" y="{_TOP - 14}" text-anchor="end">{spans}</text>'
    for tick in scale.ticks(5):
        y = _TOP + (1 - float(scale.position(np.array([tick]))[0])) * _TALL
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        label = escape(format_value(tick))
        yield f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    first, last = (escape(name if len(name) <= 40 else f"{name[:18]}...{name[-18:]}") for name in _ends(flow.tensors))
    yield f'<text class="tick" x="{_LEFT}" y="{bottom + 20}">{first}</text>'
    yield f'<text class="tick" x="{right}" y="{bottom + 20}" text-anchor="end">{last}</text>'


def _ends(names: Sequence[str]) -> tuple[str, str]:
    return names[0], names[-1] if len(names) > 1 else ""


def _line(line: FlowLine, scale: AxisScale, number: int) -> Iterator[str]:
    """A line over the tensors; zero is drawn at the bottom, what is not finite as a cross at the top."""
    count = len(line.norms)
    shown = np.where(np.isfinite(line.norms), np.maximum(line.norms, scale.low), np.nan)
    heights = _TOP + (1 - scale.position(shown)) * _TALL
    points = [(_x(k, count), float(y)) for k, y in enumerate(heights) if math.isfinite(y)]
    if len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="line line{number}" points="{path}"/>'
    if count <= 80:
        yield "".join(f'<circle class="dot{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points)
    for k in np.flatnonzero(np.isinf(line.norms)):
        x = _x(int(k), count)
        yield f'<text class="annotation" x="{x:.1f}" y="{_TOP + 10}" text-anchor="middle">{CROSS}</text>'


def flow_rows(flow: GradientFlow) -> Iterator[tuple[str, ...]]:
    """The same as a table: each tensor with its norms."""
    for k, name in enumerate(flow.tensors[:MAX_LISTED]):
        yield name, *(_norm_text(float(line.norms[k])) for line in flow.lines)


def _norm_text(norm: float) -> str:
    return "no gradient" if math.isnan(norm) else "not finite" if math.isinf(norm) else format_value(norm)

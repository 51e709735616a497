"""A small text plot: braille if the terminal can show it, plain ASCII otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from rich.text import Text

from surefoot.logs.report.axes import AxisScale, Floats, choose_scale, clip_finite, step_range, thin_points
from surefoot.logs.report.wording import format_count, format_value

BRAILLE_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a braille character, by row and column."""
_LABEL_WIDTH = 9


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One curve of a plot; the first is drawn as a line, others as sparse marks."""

    label: str
    steps: Floats
    values: Floats
    style: str = ""


@dataclass(frozen=True, slots=True)
class PlotSymbols:
    """The characters of a plot."""

    line: str
    other: str
    bad: str
    onset: str
    guide: str
    corner: str
    floor: str
    tick: str


UNICODE_SYMBOLS = PlotSymbols(line="⠒⠒", other="●", bad="\u00d7", onset="▲", guide="┊", corner="└", floor="─", tick="┤")
ASCII_SYMBOLS = PlotSymbols(line="*", other="o", bad="x", onset="^", guide=":", corner="+", floor="-", tick="|")


def shows_braille(encoding: str | None) -> bool:
    """Whether a terminal with this encoding can show the Unicode symbols."""
    try:
        ("".join(astuple(UNICODE_SYMBOLS)) + "⣿│·").encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def plot_text(
    curves: Sequence[PlotLine],
    *,
    width: int,
    height: int = 8,
    onset: float | None = None,
    unit: str = "step",
    unicode: bool = True,
    scale: AxisScale | None = None,
) -> list[Text]:
    """Lines of text, at most `width` wide: the curves over steps, the onset, and non-finite values.

    Without a `scale` it is chosen by the values.
    """
    curves = [_thin_line(curve) for curve in curves if len(curve.values)]
    if not curves:
        return []
    marks = UNICODE_SYMBOLS if unicode else ASCII_SYMBOLS
    if not any(np.isfinite(curve.values).any() for curve in curves):
        height = 0
    cells = max(10, width - _LABEL_WIDTH - 2)
    first, last = step_range([curve.steps for curve in curves])
    scale = scale or choose_scale([curve.values for curve in curves])
    where = [_columns(curve.steps, first, last, cells) for curve in curves]
    canvas = _draw_line(curves[0], scale, first, last, cells, height, fine=unicode)
    mark = None if onset is None else int(_columns(np.array([float(onset)]), first, last, cells)[0])
    if mark is not None:
        for row in range(height):
            if canvas[row][mark][0] == " ":
                canvas[row][mark] = (marks.guide, "dim")
    for curve, columns in zip(curves[1:], where[1:], strict=True):
        _draw_marks(canvas, curve, columns, scale, marks.other)
    lines = _nonfinite_strip(curves, where, cells, marks)
    lines += _with_labels(canvas, scale, height, marks)
    lines += _axis(first, last, onset, mark, cells, unit, marks)
    return [*lines, _legend(curves, scale, marks, bad=len(lines) > height + 2)]


def _thin_line(curve: PlotLine) -> PlotLine:
    steps, values = thin_points(curve.steps, curve.values, 20_000)
    return replace(curve, steps=steps, values=values)


def _columns(steps: Floats, first: float, last: float, cells: int) -> np.ndarray:
    share = (clip_finite(np.where(np.isfinite(steps), steps, first)) - first) / ((last - first) or 1.0)
    return np.clip(np.round(share * (cells - 1)), 0, cells - 1).astype(int)


Canvas = list[list[tuple[str, str]]]


def _draw_line(
    curve: PlotLine, scale: AxisScale, first: float, last: float, cells: int, height: int, *, fine: bool
) -> Canvas:
    """The first curve as a connected line, in braille dots or one character per point."""
    wide, tall = (2, 4) if fine else (1, 1)
    across, down = cells * wide, height * tall
    dots = np.zeros((down, across), dtype=bool)
    for x, y in _line_dots(_columns(curve.steps, first, last, across), scale.position(curve.values), down):
        dots[y, x] = True
    canvas: Canvas = []
    for row in range(height):
        line: list[tuple[str, str]] = []
        for cell in range(cells):
            block = dots[row * tall : (row + 1) * tall, cell * wide : (cell + 1) * wide]
            if not block.any():
                line.append((" ", ""))
            elif not fine:
                line.append((ASCII_SYMBOLS.line, curve.style))
            else:
                bits = sum(BRAILLE_BITS[y][x] for y, x in zip(*np.nonzero(block), strict=True))
                line.append((chr(0x2800 + bits), curve.style))
        canvas.append(line)
    return canvas


def _line_dots(columns: np.ndarray, places: Floats, down: int) -> list[tuple[int, int]]:
    """The dots of a line through all points; a non-finite value breaks it."""
    rows = np.round((1 - np.nan_to_num(places)) * (down - 1)).astype(int)
    dots: list[tuple[int, int]] = []
    before: tuple[int, int] | None = None
    for index in _shaping_points(columns, places):
        if np.isnan(places[index]):
            before = None
            continue
        x, y = int(columns[index]), int(rows[index])
        if before is None:
            dots.append((x, y))
        else:
            long = max(abs(x - before[0]), abs(y - before[1]), 1)
            xs = np.round(np.linspace(before[0], x, long + 1)).astype(int)
            ys = np.round(np.linspace(before[1], y, long + 1)).astype(int)
            dots.extend(zip(xs.tolist(), ys.tolist(), strict=True))
        before = (x, y)
    return dots


def _shaping_points(columns: np.ndarray, places: Floats) -> list[int]:
    """The points of each column that shape the line: the first, the lowest, the highest and the last."""
    order = np.argsort(columns, kind="stable")
    edges = np.flatnonzero(np.diff(columns[order])) + 1
    chosen: list[int] = []
    for group in np.split(order, edges):
        finite = group[np.isfinite(places[group])]
        if not len(finite):
            chosen.append(int(group[0]))
            continue
        four = {finite[0], finite[places[finite].argmin()], finite[places[finite].argmax()], finite[-1]}
        chosen.extend(sorted(int(index) for index in four))
    return chosen


def _draw_marks(canvas: Canvas, curve: PlotLine, columns: np.ndarray, scale: AxisScale, mark: str) -> None:
    """Another curve as single marks, sparse enough to keep the line visible."""
    places = scale.position(curve.values)
    height = len(canvas)
    used = np.unique(columns)
    apart = 1 if len(used) <= 20 else max(2, len(canvas[0]) // 18) if canvas else 1
    last = -apart
    for column in used:
        heights = places[(columns == column) & np.isfinite(places)]
        if len(heights) and column - last >= apart:
            canvas[round((1 - float(np.median(heights))) * (height - 1))][column] = (mark, curve.style)
            last = int(column)


def _nonfinite_strip(
    curves: Sequence[PlotLine], where: Sequence[np.ndarray], cells: int, marks: PlotSymbols
) -> list[Text]:
    strip = [" "] * cells
    for curve, columns in zip(curves, where, strict=True):
        for column in np.unique(columns[~np.isfinite(curve.values)]):
            strip[column] = marks.bad
    if marks.bad not in strip:
        return []
    return [Text.assemble((f"{'NaN/Inf':>{_LABEL_WIDTH}} ", "red"), " ", ("".join(strip).rstrip(), "red"))]


def _with_labels(canvas: Canvas, scale: AxisScale, height: int, marks: PlotSymbols) -> list[Text]:
    labels: dict[int, str] = {}
    for tick in [scale.high, scale.low, *scale.ticks(max(2, height // 3))] if height else ():
        row = round((1 - float(scale.position(np.array([tick]))[0])) * (height - 1))
        if not any(abs(row - other) < 2 for other in labels):
            labels[row] = format_value(tick)
    lines: list[Text] = []
    for row, cells in enumerate(canvas):
        line = Text(f"{labels.get(row, ''):>{_LABEL_WIDTH}} ", style="dim")
        line.append(marks.tick if row in labels else ("│" if marks is UNICODE_SYMBOLS else "|"), "dim")
        for character, style in cells:
            line.append(character, style or None)
        line.rstrip()
        lines.append(line)
    return lines


def _axis(
    first: float, last: float, onset: float | None, mark: int | None, cells: int, unit: str, marks: PlotSymbols
) -> list[Text]:
    floor = [marks.floor] * cells
    if mark is not None:
        floor[mark] = marks.onset
    line = Text(" " * (_LABEL_WIDTH + 1), style="dim").append(marks.corner, "dim")
    for character in floor:
        line.append(character, "bold red" if character == marks.onset else "dim")
    start, end = f"{unit} {format_count(first)}", format_count(last)
    words = list(start.ljust(cells))
    words[max(0, cells - len(end)) :] = list(end)[-cells:]
    if mark is not None and onset is not None:
        label = format_count(onset)
        left = min(max(0, mark - len(label) // 2), max(0, cells - len(label)))
        around = "".join(words[max(0, left - 1) : left + len(label) + 1])
        if not around.strip():
            words[left : left + len(label)] = list(label)
    return [line, Text(" " * (_LABEL_WIDTH + 2) + "".join(words).rstrip(), style="dim")]


def _legend(curves: Sequence[PlotLine], scale: AxisScale, marks: PlotSymbols, *, bad: bool) -> Text:
    legend = Text(" " * (_LABEL_WIDTH + 2))
    for index, curve in enumerate(curves):
        legend.append((marks.line if index == 0 else marks.other) + " ", curve.style or None)
        legend.append(curve.label + "   ", "dim")
    if bad:
        legend.append(marks.bad, "red").append(" not a number   ", "dim")
    if scale.kind != "linear":
        legend.append("log scale", "dim")
    legend.rstrip()
    return legend

"""Shows a comparison in the terminal, as a plot, and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from surefoot.logs.log_diagnosis import LogDiagnosis
from surefoot.logs.report.comparison import LogComparison
from surefoot.logs.report.html_page import escape_text, html_document, html_table, list_items, save_page
from surefoot.logs.report.matplotlib_plot import INK, PictureTitle, save_picture
from surefoot.logs.report.panels import Panel, runs_panels
from surefoot.logs.report.svg_plot import draw_svg
from surefoot.logs.report.terminal_page import render
from surefoot.logs.report.terminal_plot import PlotLine, plot_text, shows_braille
from surefoot.logs.report.wording import clean

MAX_SETTINGS = 8
"""Differing settings shown in the terminal."""


def as_text(comparison: LogComparison, *, width: int = 80, colour: bool = False, encoding: str | None = "utf-8") -> str:
    """The page as text: one sentence, the plot, the differences."""
    parts: list[RenderableType] = [Text(clean(comparison.sentence), style="bold")]
    drawn = plot_text(
        _curves(comparison),
        width=width,
        onset=comparison.diverged_at,
        unit=_unit(comparison),
        unicode=shows_braille(encoding),
    )
    if drawn:
        parts += [Text(), *drawn]
    parts += [Text(), _grid(comparison.rows)]
    if comparison.settings:
        parts += [Text(), Text("What was set differently", style="bold"), _grid(comparison.settings[:MAX_SETTINGS])]
        if len(comparison.settings) > MAX_SETTINGS:
            parts.append(Text(f"and {len(comparison.settings) - MAX_SETTINGS} more: --json has them all", style="dim"))
    for name, diagnosis in (("A", comparison.a), ("B", comparison.b)):
        if diagnosis.is_trouble:
            parts += [Text(), Text(f"{name}: {clean(diagnosis.sentence)}")]
    parts += [Text(f"note: {note}", style="dim") for note in comparison.notes[:2]]
    return render(Group(*parts), width=width, colour=colour)


def _grid(rows: tuple[tuple[str, str, str], ...]) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    grid.add_row("", Text("A", style="bold"), Text("B", style="bold cyan"))
    for name, a, b in rows:
        grid.add_row(Text(name), Text(a), Text(b))
    return grid


def _curves(comparison: LogComparison) -> list[PlotLine]:
    return [
        PlotLine(name, diagnosis.curves.loss.steps, diagnosis.curves.loss.values, style)
        for name, diagnosis, style in (("A", comparison.a, "bold"), ("B", comparison.b, "cyan"))
        if diagnosis.curves is not None
    ]


def _unit(comparison: LogComparison) -> str:
    return next(
        (diagnosis.curves.unit for diagnosis in (comparison.a, comparison.b) if diagnosis.curves is not None), "step"
    )


def panels(comparison: LogComparison) -> list[Panel]:
    """Both runs in one plot."""
    pairs = (("A", comparison.a), ("B", comparison.b))
    return runs_panels([(name, diagnosis.curves) for name, diagnosis in pairs if diagnosis.curves is not None])


def draw(comparison: LogComparison, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """Draw both runs into a file."""
    about = PictureTitle(
        clean(comparison.sentence), colour=INK, onset=comparison.diverged_at, onset_label="part", unit=_unit(comparison)
    )
    save_picture(panels(comparison), path, about, inputs=inputs, force=force)


def write(comparison: LogComparison, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """Write both runs as an HTML page."""
    save_page(as_html(comparison), path, inputs=inputs, force=force)


def as_html(comparison: LogComparison) -> str:
    drawn = draw_svg(
        panels(comparison),
        title=clean(comparison.sentence),
        onset=comparison.diverged_at,
        onset_label="part",
        unit=_unit(comparison),
    )
    parts = [f"<h1>{escape_text(comparison.sentence)}</h1>", f"<figure>{drawn}</figure>" if drawn else ""]
    parts.append(html_table(comparison.rows, ("", "A", "B")))
    if comparison.settings:
        parts.append("<h2>What was set differently</h2>" + html_table(comparison.settings, ("", "A", "B")))
    for name, diagnosis in (("A", comparison.a), ("B", comparison.b)):
        parts.append(f"<h2>{name}</h2>{_verdict_html(diagnosis)}")
    if comparison.notes:
        parts.append(f"<h2>Notes</h2><ul>{list_items(comparison.notes)}</ul>")
    return html_document(clean(comparison.sentence, 120), "".join(parts))


def _verdict_html(diagnosis: LogDiagnosis) -> str:
    verdict = f'<span class="verdict {diagnosis.verdict}">{diagnosis.verdict.upper()}</span>'
    return f"<p>{verdict} {escape_text(diagnosis.sentence)}</p>"

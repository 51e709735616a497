"""A comparison for people: in the terminal, as a picture, as a web page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from surefoot.logs.log_diagnosis import LogDiagnosis
from surefoot.logs.report.comparison import LogComparison
from surefoot.logs.report.html_page import escape_text, html_document, html_table, list_items, save_page
from surefoot.logs.report.matplotlib_plot import INK, PictureTitle
from surefoot.logs.report.matplotlib_plot import save_picture as save_picture
from surefoot.logs.report.panels import Panel, runs_panels
from surefoot.logs.report.svg_plot import draw_svg
from surefoot.logs.report.terminal_page import render
from surefoot.logs.report.terminal_plot import PlotLine, plot_text, shows_braille
from surefoot.logs.report.wording import clean

MAX_SETTINGS = 8
"""Differing settings that a page in the terminal shows."""


def as_text(found: LogComparison, *, width: int = 80, colour: bool = False, encoding: str | None = "utf-8") -> str:
    """The page as a string; one sentence first, then the plot, then what differs."""
    parts: list[RenderableType] = [Text(clean(found.sentence), style="bold")]
    drawn = plot_text(
        _curves(found), width=width, onset=found.diverged_at, unit=_unit(found), unicode=shows_braille(encoding)
    )
    if drawn:
        parts += [Text(), *drawn]
    parts += [Text(), _grid(found.rows)]
    if found.settings:
        parts += [Text(), Text("What was set differently", style="bold"), _grid(found.settings[:MAX_SETTINGS])]
        if len(found.settings) > MAX_SETTINGS:
            parts.append(Text(f"and {len(found.settings) - MAX_SETTINGS} more: --json has them all", style="dim"))
    for name, answer in (("A", found.a), ("B", found.b)):
        if answer.is_trouble:
            parts += [Text(), Text(f"{name}: {clean(answer.sentence)}")]
    parts += [Text(f"note: {note}", style="dim") for note in found.notes[:2]]
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


def _curves(found: LogComparison) -> list[PlotLine]:
    return [
        PlotLine(name, answer.curves.loss.steps, answer.curves.loss.values, style)
        for name, answer, style in (("A", found.a, "bold"), ("B", found.b, "cyan"))
        if answer.curves is not None
    ]


def _unit(found: LogComparison) -> str:
    return next((one.curves.unit for one in (found.a, found.b) if one.curves is not None), "step")


def panels(found: LogComparison) -> list[Panel]:
    """Both runs in one picture."""
    pairs = (("A", found.a), ("B", found.b))
    return runs_panels([(name, one.curves) for name, one in pairs if one.curves is not None])


def draw(found: LogComparison, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """Both runs as a picture in a file."""
    about = PictureTitle(
        clean(found.sentence), colour=INK, onset=found.diverged_at, onset_label="part", unit=_unit(found)
    )
    save_picture(panels(found), path, about, inputs=inputs, force=force)


def write(found: LogComparison, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """Both runs as a web page in a file."""
    save_page(as_html(found), path, inputs=inputs, force=force)


def as_html(found: LogComparison) -> str:
    drawn = draw_svg(
        panels(found), title=clean(found.sentence), onset=found.diverged_at, onset_label="part", unit=_unit(found)
    )
    parts = [f"<h1>{escape_text(found.sentence)}</h1>", f"<figure>{drawn}</figure>" if drawn else ""]
    parts.append(html_table(found.rows, ("", "A", "B")))
    if found.settings:
        parts.append("<h2>What was set differently</h2>" + html_table(found.settings, ("", "A", "B")))
    for name, answer in (("A", found.a), ("B", found.b)):
        parts.append(f"<h2>{name}</h2>{_verdict_html(answer)}")
    if found.notes:
        parts.append(f"<h2>Notes</h2><ul>{list_items(found.notes)}</ul>")
    return html_document(clean(found.sentence, 120), "".join(parts))


def _verdict_html(answer: LogDiagnosis) -> str:
    verdict = f'<span class="verdict {answer.verdict}">{answer.verdict.upper()}</span>'
    return f"<p>{verdict} {escape_text(answer.sentence)}</p>"

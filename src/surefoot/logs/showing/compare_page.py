"""A comparison for people: in the terminal, as a picture, as a web page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from surefoot.logs.answer import Answer
from surefoot.logs.showing.characters import Curve, plot, shows_braille
from surefoot.logs.showing.compare import Comparison
from surefoot.logs.showing.page import rendered
from surefoot.logs.showing.panels import Panel, panels_of
from surefoot.logs.showing.picture import INK, Titled
from surefoot.logs.showing.picture import save as save_picture
from surefoot.logs.showing.svg import svg
from surefoot.logs.showing.webpage import document, listed, safe, save, table
from surefoot.logs.showing.words import clean

SETTINGS = 8
"""Differing settings that a page in the terminal shows."""


def as_text(found: Comparison, *, width: int = 80, colour: bool = False, encoding: str | None = "utf-8") -> str:
    """The page as a string; one sentence first, then the plot, then what differs."""
    parts: list[RenderableType] = [Text(clean(found.sentence), style="bold")]
    drawn = plot(_curves(found), width=width, onset=found.parted, unit=_unit(found), fine=shows_braille(encoding))
    if drawn:
        parts += [Text(), *drawn]
    parts += [Text(), _grid(found.rows)]
    if found.settings:
        parts += [Text(), Text("What was set differently", style="bold"), _grid(found.settings[:SETTINGS])]
        if len(found.settings) > SETTINGS:
            parts.append(Text(f"and {len(found.settings) - SETTINGS} more: --json has them all", style="dim"))
    for name, answer in (("A", found.a), ("B", found.b)):
        if answer.trouble:
            parts += [Text(), Text(f"{name}: {clean(answer.sentence)}")]
    parts += [Text(f"note: {note}", style="dim") for note in found.notes[:2]]
    return rendered(Group(*parts), width=width, colour=colour)


def _grid(rows: tuple[tuple[str, str, str], ...]) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    grid.add_row("", Text("A", style="bold"), Text("B", style="bold cyan"))
    for name, a, b in rows:
        grid.add_row(Text(name), Text(a), Text(b))
    return grid


def _curves(found: Comparison) -> list[Curve]:
    return [
        Curve(name, answer.course.loss.steps, answer.course.loss.values, style)
        for name, answer, style in (("A", found.a, "bold"), ("B", found.b, "cyan"))
        if answer.course is not None
    ]


def _unit(found: Comparison) -> str:
    return next((one.course.unit for one in (found.a, found.b) if one.course is not None), "step")


def panels(found: Comparison) -> list[Panel]:
    """Both runs in one picture."""
    pairs = (("A", found.a), ("B", found.b))
    return panels_of([(name, one.course) for name, one in pairs if one.course is not None])


def draw(found: Comparison, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """Both runs as a picture in a file."""
    about = Titled(clean(found.sentence), colour=INK, onset=found.parted, word="part", unit=_unit(found))
    save_picture(panels(found), path, about, inputs=inputs, force=force)


def write(found: Comparison, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """Both runs as a web page in a file."""
    save(as_html(found), path, inputs=inputs, force=force)


def as_html(found: Comparison) -> str:
    drawn = svg(panels(found), title=clean(found.sentence), onset=found.parted, word="part", unit=_unit(found))
    parts = [f"<h1>{safe(found.sentence)}</h1>", f"<figure>{drawn}</figure>" if drawn else ""]
    parts.append(table(found.rows, ("", "A", "B")))
    if found.settings:
        parts.append("<h2>What was set differently</h2>" + table(found.settings, ("", "A", "B")))
    for name, answer in (("A", found.a), ("B", found.b)):
        parts.append(f"<h2>{name}</h2>{_verdict(answer)}")
    if found.notes:
        parts.append(f"<h2>Notes</h2><ul>{listed(found.notes)}</ul>")
    return document(clean(found.sentence, 120), "".join(parts))


def _verdict(answer: Answer) -> str:
    verdict = f'<span class="verdict {answer.verdict}">{answer.verdict.upper()}</span>'
    return f"<p>{verdict} {safe(answer.sentence)}</p>"

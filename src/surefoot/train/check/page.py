"""The checklist for a person: one line an item, and under those that are not well the way out."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from surefoot.train.check.item import Report, Status

_SIGNS = {
    Status.OK: ("ok", "green"),
    Status.SKIPPED: ("skipped", "dim"),
    Status.WARNING: ("warning", "yellow"),
    Status.FAILED: ("failed", "bold red"),
}


def show(report: Report, console: Console) -> None:
    """Print it; the last line is the verdict."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in report.items:
        sign, style = _SIGNS[item.status]
        words = Text(item.found)
        if item.way_out:
            words.append(f"\n-> {item.way_out}", style="dim" if item.status is Status.SKIPPED else "bold")
        table.add_row(Text(sign, style=style), Text(item.name), words)
    console.print(table)
    bad, doubtful = report.count(Status.FAILED), report.count(Status.WARNING)
    if bad:
        verdict = f"Not yet: {bad} of {len(report.items)} failed. The arrows say what to do."
    elif doubtful:
        verdict = f"It can be trained; {doubtful} warning{'s' * (doubtful > 1)} to look at first."
    else:
        verdict = "All is well: it can be trained."
    console.print(Text(f"\n{report.name}: {verdict}", style="bold"))

"""The report of a check: one item per question, with its status, what was measured and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class CheckStatus(StrEnum):
    """The result of an item, from best to worst."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAILED = "failed"


_STYLES = {
    CheckStatus.OK: "green",
    CheckStatus.SKIPPED: "dim",
    CheckStatus.WARNING: "yellow",
    CheckStatus.FAILED: "bold red",
}


@dataclass(frozen=True, slots=True)
class CheckItem:
    """One answered question of the checklist."""

    name: str
    status: CheckStatus
    message: str
    """What was measured."""
    fix: str = ""
    """What to do about it; empty when nothing is wrong."""
    values: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": str(self.status),
            "found": self.message,
            "way_out": self.fix,
            "figures": self.values,
        }


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The whole checklist."""

    name: str
    items: list[CheckItem]
    is_first: bool = True
    """Whether this is the first rank, which prints for all."""

    @property
    def failed(self) -> bool:
        return any(item.status is CheckStatus.FAILED for item in self.items)

    def count(self, status: CheckStatus) -> int:
        return sum(item.status is status for item in self.items)

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.name,
            "passed": not self.failed,
            "counts": {str(status): self.count(status) for status in CheckStatus},
            "items": [item.as_json() for item in self.items],
        }


def print_report(report: CheckReport, console: Console) -> None:
    """Print one line per item, what to do below those that are not ok, and a verdict at the end."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for item in report.items:
        message = Text(item.message)
        if item.fix:
            message.append(f"\n-> {item.fix}", style="dim" if item.status is CheckStatus.SKIPPED else "bold")
        table.add_row(Text(str(item.status), style=_STYLES[item.status]), Text(item.name), message)
    console.print(table)
    failures, warnings = report.count(CheckStatus.FAILED), report.count(CheckStatus.WARNING)
    if failures:
        verdict = f"Not ready: {failures} of {len(report.items)} items failed. The arrows say what to do."
    elif warnings:
        verdict = f"Ready to train; look at {warnings} warning{'s' * (warnings > 1)} first."
    else:
        verdict = "Ready to train."
    console.print(Text(f"\n{report.name}: {verdict}", style="bold"))


def worst(statuses: Iterable[CheckStatus]) -> CheckStatus:
    """The worst status; ok if there is none."""
    order = list(CheckStatus)
    return max(statuses, key=order.index, default=CheckStatus.OK)


def ok(name: str, message: str, **values: Any) -> CheckItem:
    return CheckItem(name, CheckStatus.OK, message, values=values)


def skipped(name: str, reason: str, fix: str = "", **values: Any) -> CheckItem:
    return CheckItem(name, CheckStatus.SKIPPED, reason, fix, values)


def warning(name: str, message: str, fix: str, **values: Any) -> CheckItem:
    return CheckItem(name, CheckStatus.WARNING, message, fix, values)


def failed(name: str, message: str, fix: str, **values: Any) -> CheckItem:
    return CheckItem(name, CheckStatus.FAILED, message, fix, values)


def first_few(names: Iterable[str], limit: int = 4) -> str:
    """The first few of many names, and how many more there are."""
    names = list(names)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")

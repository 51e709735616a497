"""One answer of a check, and all of them: what was asked, what was measured, and the way out when it is not well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How an item came out, from best to worst."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Item:
    """One question of the checklist, answered."""

    name: str
    status: Status
    found: str
    """What was measured, in words."""
    way_out: str = ""
    """What to do about it; empty when all is well."""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": str(self.status),
            "found": self.found,
            "way_out": self.way_out,
            "figures": self.figures,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The whole checklist."""

    name: str
    items: list[Item]
    first: bool = True
    """Whether this process speaks for all."""

    @property
    def failed(self) -> bool:
        return any(item.status is Status.FAILED for item in self.items)

    def count(self, status: Status) -> int:
        return sum(item.status is status for item in self.items)

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.name,
            "passed": not self.failed,
            "counts": {str(status): self.count(status) for status in Status},
            "items": [item.as_json() for item in self.items],
        }


def worst(statuses: Iterable[Status]) -> Status:
    """The worst of them; ok when there is none."""
    order = list(Status)
    return max(statuses, key=order.index, default=Status.OK)


def ok(name: str, found: str, **figures: Any) -> Item:
    return Item(name, Status.OK, found, figures=figures)


def skipped(name: str, why: str, way_out: str = "", **figures: Any) -> Item:
    return Item(name, Status.SKIPPED, why, way_out, figures)


def warning(name: str, found: str, way_out: str, **figures: Any) -> Item:
    return Item(name, Status.WARNING, found, way_out, figures)


def failed(name: str, found: str, way_out: str, **figures: Any) -> Item:
    return Item(name, Status.FAILED, found, way_out, figures)


def some(names: Iterable[str], most: int = 4) -> str:
    """The first few of many names."""
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")

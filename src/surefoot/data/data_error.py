"""Problems with data: the error that stops a run, and samples that are merely skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class DataError(ValueError):
    """Data that a run cannot use; the message says what is wrong, where, and what to do."""


@dataclass(frozen=True, slots=True)
class UnreadableSample:
    """A sample that could not be read, under a name the user recognises."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(slots=True)
class ReadReport:
    """Unreadable samples and notes for the user, collected while data was read."""

    unreadable: list[UnreadableSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_unreadable(unreadable: Sequence[UnreadableSample], limit: int) -> None:
    """Raise DataError when more than `limit` samples could not be read."""
    if len(unreadable) <= limit:
        return
    first = "".join(f"\n  {sample}" for sample in unreadable[:5])
    more = f"\n  and {len(unreadable) - 5} more" if len(unreadable) > 5 else ""
    raise DataError(
        f"{len(unreadable)} samples could not be read, and data.bad_samples allows {limit}:{first}{more}\n"
        "Repair or remove them, narrow data.path with a pattern such as 'texts/**/*.txt', or raise data.bad_samples."
    )

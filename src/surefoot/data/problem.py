"""What is wrong with data: the error that stops a run, and the sample that is merely passed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DataError(ValueError):
    """Data that a run cannot use; the message names what is wrong, where, and the way out."""


@dataclass(frozen=True, slots=True)
class UnreadableSample:
    """A sample that could not be read, by the name its owner knows it by."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def check_unreadable(unreadable: Sequence[UnreadableSample], limit: int) -> None:
    """Refuse to go on when more samples than `most` could not be read."""
    if len(unreadable) <= limit:
        return
    first = "".join(f"\n  {one}" for one in unreadable[:5])
    more = f"\n  and {len(unreadable) - 5} more" if len(unreadable) > 5 else ""
    raise DataError(
        f"{len(unreadable)} samples could not be read, and data.bad_samples allows {limit}:{first}{more}\n"
        "Mend or remove them, narrow data.path with a pattern such as 'texts/**/*.txt', or raise data.bad_samples."
    )

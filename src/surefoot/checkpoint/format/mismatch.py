"""What is raised when files and a run do not belong together."""

from __future__ import annotations

from collections.abc import Sequence


class DoesNotFit(ValueError):
    """A checkpoint cannot be read, or is of another run than the one that is there; nothing was written."""


def few(names: Sequence[str]) -> str:
    """The first of many names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more

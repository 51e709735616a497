"""Which line of a stack is the user's own."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

_MACHINERY = ("site-packages", "/surefoot/", "\\surefoot\\", "/lib/python", "<frozen", "<string>")


def own_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line outside of libraries, else the innermost of all."""
    own = [line for line in stack if not any(part in line.filename for part in _MACHINERY)]
    for line in reversed(own or stack):
        return f"{line.filename}:{line.lineno} in {line.name}"
    return "a place that is not known"

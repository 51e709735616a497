"""Which line of a stack is the user's own."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_HOMES = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
"""Folders of surefoot itself and of Python: a user's own folder may well have the name of either."""
_MACHINERY = ("site-packages", "dist-packages", "<frozen", "<string>")


def own_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line outside of libraries, else the innermost of all."""
    own = [line for line in stack if not _foreign(line.filename)]
    for line in reversed(own or stack):
        return f"{line.filename}:{line.lineno} in {line.name}"
    return "a place that is not known"


def _foreign(file: str) -> bool:
    return any(part in file for part in _MACHINERY) or any(file.startswith(home + os.sep) for home in _HOMES)

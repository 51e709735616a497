"""The recipes that come with surefoot, to run as they are or to copy and change."""

from __future__ import annotations

from pathlib import Path

NAMES = ("lm-tiny", "lm-small", "lm-124m", "lm-1b")
"""From the smallest to the largest."""


def shipped() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {name: Path(__file__).with_name(f"{name}.yaml") for name in NAMES}


def summary(path: Path) -> str:
    """What a shipped recipe says about itself: its first line, without the name."""
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").partition(": ")[2].strip()

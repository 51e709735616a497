"""The recipes that ship with surefoot, to run as they are or to copy and edit."""

from __future__ import annotations

from pathlib import Path

NAMES = ("lm-tiny", "lm-small", "lm-124m", "lm-1b")
"""Smallest to largest."""


def shipped() -> dict[str, Path]:
    """The files of the shipped recipes by name."""
    return {name: Path(__file__).with_name(f"{name}.yaml") for name in NAMES}


def summary(path: Path) -> str:
    """The first comment line of a shipped recipe, without its name."""
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").partition(": ")[2].strip()

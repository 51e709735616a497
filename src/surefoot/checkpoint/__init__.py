"""Keeping and restoring the state of a run; `Checkpoints` is all of it for a loop that wants nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.checkpoint.manager import Resumed
    from surefoot.checkpoint.standalone import Checkpoints
    from surefoot.checkpoint.store import Retention

__all__ = ["Checkpoints", "Resumed", "Retention"]

_HOMES = {
    "Checkpoints": "surefoot.checkpoint.standalone",
    "Resumed": "surefoot.checkpoint.manager",
    "Retention": "surefoot.checkpoint.store",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'surefoot.checkpoint' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

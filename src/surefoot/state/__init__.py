"""Keeping and restoring the state of a run; `Checkpoints` is all of it for a loop that wants nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.state.checkpoints import Checkpoints
    from surefoot.state.keeping import Resumed
    from surefoot.state.store import Retention

__all__ = ["Checkpoints", "Resumed", "Retention"]

_HOMES = {
    "Checkpoints": "surefoot.state.checkpoints",
    "Resumed": "surefoot.state.keeping",
    "Retention": "surefoot.state.store",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'surefoot.state' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

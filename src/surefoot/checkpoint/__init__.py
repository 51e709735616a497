"""Copies the state of a run in memory (Snapshot) and on disk (Checkpoint), and restores it bit for bit.

`Checkpoints` is the public API for a training loop that uses nothing else of surefoot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.checkpoint.manager import Resumed
    from surefoot.checkpoint.standalone import Checkpoints
    from surefoot.checkpoint.store import Retention

__all__ = ["Checkpoints", "Resumed", "Retention"]

_MODULES = {
    "Checkpoints": "surefoot.checkpoint.standalone",
    "Resumed": "surefoot.checkpoint.manager",
    "Retention": "surefoot.checkpoint.store",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'surefoot.checkpoint' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value

"""Where this checkout is, and the environment in which worker processes find its packages."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def worker_env(**variables: str) -> dict[str, str]:
    """The environment of a worker process: it imports this checkout from whatever directory it starts in."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables

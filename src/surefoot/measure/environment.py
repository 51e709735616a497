"""What a run is made of besides its weights: code version, seeds, libraries, machine."""

from __future__ import annotations

import platform
import random
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Code version, seeds and environment for `run.json`."""
    return {
        "code": _git(),
        "seeds": {
            "torch": torch.initial_seed(),
            "numpy_state": _mark(np.random.get_state()),
            "python_state": _mark(random.getstate()),
        },
        "environment": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "numpy": np.__version__,
            "platform": platform.platform(),
            "host": platform.node(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
            "argv": sys.argv,
        },
    }


def _mark(state: object) -> str:
    """A short mark of a random state: no seed can be read back from one, but equal starts can be told."""
    return f"{zlib.crc32(repr(state).encode()):08x}"


def _git() -> dict[str, Any]:
    """Commit of the code in the working directory, if it is under git."""
    commit = _ask("git", "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None}
    return {"commit": commit, "changed": bool(_ask("git", "status", "--porcelain", "--untracked-files=no"))}


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

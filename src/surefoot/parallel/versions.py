"""Checks that all ranks run the same software versions, and names those that differ."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl

from surefoot import __version__
from surefoot.parallel.process_group import ParallelError, World

_DRIVER = Path("/proc/driver/nvidia/version")
_TOLERATED = ("driver", "device")
"""These may differ: speed or the last bits may change, so it is reported, but it is no reason to stop."""


def check_versions(world: World) -> list[str]:
    """Compare the versions of all ranks, which all call it; returns notes on differences that are tolerated.

    If torch, CUDA, NCCL, Python or surefoot differ, all ranks raise the same error, which names the rank.
    """
    if world.size == 1:
        return []
    versions: list[dict[str, str]] = [{}] * world.size
    dist.all_gather_object(versions, local_versions(world.device))
    errors, notes = compare_versions(versions)
    if errors:
        raise ParallelError(
            f"the ranks run different software, and would train different models or hang: {'; '.join(errors)}. "
            "Install the same versions on every host, or start all processes from the same environment or image."
        )
    return notes


def local_versions(device: torch.device) -> dict[str, str]:
    """The versions, device and host of this process."""
    cuda = device.type == "cuda"
    return {
        "host": platform.node(),
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "surefoot": __version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl.version())) if cuda else "none",
        "driver": _driver() if cuda else "none",
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
    }


def compare_versions(versions: Sequence[dict[str, str]]) -> tuple[list[str], list[str]]:
    """Differences that must not be, and tolerated ones; each a sentence with rank and host."""
    errors: list[str] = []
    notes: list[str] = []
    for name in [key for key in versions[0] if key != "host"]:
        values = [version.get(name, "none") for version in versions]
        most_common = Counter(values).most_common(1)[0][0]
        others = [rank for rank, value in enumerate(values) if value != most_common]
        messages = notes if name in _TOLERATED else errors
        for rank in others[:8]:
            host = versions[rank].get("host", "?")
            messages.append(f"rank {rank} on {host} has {name} {values[rank]}, most have {most_common}")
        if len(others) > 8:
            messages.append(f"and {len(others) - 8} more with another {name}")
    return errors, notes


def _driver() -> str:
    try:
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return "unknown"
    return match[1] if match else "unknown"

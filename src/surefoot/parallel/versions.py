"""Whether all processes run the same software; those that differ are named."""

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
from surefoot.parallel.world import ParallelError, World

_DRIVER = Path("/proc/driver/nvidia/version")
_TOLERATED = ("driver", "device")
"""May differ: worth a word, since speed or the last bits may differ with it, but no reason to stop."""


def check_versions(world: World) -> list[str]:
    """Compare versions on all processes, which call it at once; what may differ, but does, is returned in words.

    Where torch, CUDA, NCCL, Python or surefoot differ, all processes raise the same error, which names the rank.
    """
    if world.size == 1:
        return []
    told: list[dict[str, str]] = [{}] * world.size
    dist.all_gather_object(told, local_versions(world.device))
    wrong, odd = compare_versions(told)
    if wrong:
        raise ParallelError(
            f"the processes run different software, and would train different models or hang: {'; '.join(wrong)}. "
            "Install the same versions on every host, or start all processes from the same environment or image."
        )
    return odd


def local_versions(device: torch.device) -> dict[str, str]:
    """What this process runs on."""
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


def compare_versions(told: Sequence[dict[str, str]]) -> tuple[list[str], list[str]]:
    """What differs between the processes and must not, and what differs and may; in words, with ranks and hosts."""
    wrong: list[str] = []
    odd: list[str] = []
    for name in [key for key in told[0] if key != "host"]:
        usual = Counter(each.get(name, "none") for each in told).most_common(1)[0][0]
        others = [rank for rank, each in enumerate(told) if each.get(name, "none") != usual]
        for rank in others[:8]:
            has = told[rank].get(name, "none")
            words = f"rank {rank} on {told[rank].get('host', '?')} has {name} {has}, most have {usual}"
            (odd if name in _TOLERATED else wrong).append(words)
        if len(others) > 8:
            (odd if name in _TOLERATED else wrong).append(f"and {len(others) - 8} more with another {name}")
    return wrong, odd


def _driver() -> str:
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"

"""Where copies of a run can live: beside it on the device, in pinned host memory, or nowhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

Home = Literal["device", "host"]
FEWEST = 2
"""States below which a ring is of no use: a good one, and room for the next."""
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class BaseBytes:
    """Bytes of the frozen parameters that all copies refer to: in all, and those for which there is no memory yet."""

    total: int = 0
    to_allocate: Mapping[torch.device, int] = field(default_factory=dict)
    """On each device, if copies live beside the model."""
    to_allocate_on_host: int = 0
    """If copies live on the host."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where copies live and how many; `home` is None when there is no room, and `reason` says why in words."""

    home: Home | None
    count: int
    reason: str


def choose_home(
    nbytes: Mapping[torch.device, int], budget: int | None, count: int, base: BaseBytes | None = None
) -> Choice:
    """Find a home for `count` copies, or for fewer, of a run that holds `nbytes` on each device, and for their base.

    The device comes first, then the host; the copies together stay within the budget and within half of what is free.
    """
    base = base or BaseBytes()
    total, host = sum(nbytes.values()), free_bytes(_HOST)
    devices = {*nbytes, *base.to_allocate}
    free = {device: free_bytes(device) for device in devices}
    moves = any(device.type == "cuda" for device in devices)
    beside = f" beside {in_words(base.total)} of frozen parameters" if base.total else ""
    for n in range(count, FEWEST - 1, -1):
        if budget is not None and n * total + base.total > budget:
            continue
        said = f"{n} of {in_words(total)} each{beside}" + (f", not {count}, for want of room" if n < count else "")
        if all(n * nbytes.get(d, 0) + base.to_allocate.get(d, 0) <= free[d] / 2 for d in devices):
            return Choice("device", n, f"{said}, beside the model")
        if moves and n * total + base.to_allocate_on_host <= host / 2:
            return Choice("host", n, f"{said}, in host memory")
    states = f"{FEWEST} states of {in_words(total)}{beside}"
    if budget is not None and FEWEST * total + base.total > budget:
        return Choice(None, 0, f"{states} do not fit in the budget of {in_words(budget)}")
    where = ", ".join(f"{in_words(room)} on {device}" for device, room in {**free, _HOST: host}.items())
    return Choice(None, 0, f"{states} do not fit in half of the free memory ({where})")


def free_bytes(device: torch.device) -> int:
    """Memory nobody uses yet; what torch holds in reserve on a GPU will be wanted by the next forward pass."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    rooms = [room for room in (_available(), _left_in_container()) if room is not None]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(rooms, default=sys.maxsize) // processes


def _available() -> int | None:
    """None where the system does not tell: running out is noticed when a state is taken, too."""
    try:
        return 1024 * _numbers(Path("/proc/meminfo"))["MemAvailable:"]
    except (OSError, KeyError, ValueError):
        return None


def _left_in_container() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        return limit - used + _numbers(root / "memory.stat")["inactive_file"]  # a cache that gives way
    except (OSError, KeyError, ValueError):  # no container, or one without a limit
        return None


def _numbers(file: Path) -> dict[str, int]:
    """The first number on each line of a file in which every line begins with a name."""
    words = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in words}


def in_words(nbytes: float) -> str:
    """A number of bytes as people say it."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"

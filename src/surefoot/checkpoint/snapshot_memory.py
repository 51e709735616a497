"""Memory for copies of a run: whether they fit on the device or in pinned host memory, and how it is pinned.

The driver allocates pinned memory at one or two GB per second and blocks all launches meanwhile. Pinning memory that
is already mapped is over ten times as fast, and can be done in chunks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.background import raise_if_exiting

Location = Literal["device", "host"]
MIN_SNAPSHOTS = 2
"""Fewer are of no use: one good snapshot, and room for the next."""
ENOUGH_SNAPSHOTS = 4
"""Host memory is used where the device has no room for so many; room for more makes no difference."""
CHUNK_BYTES = 64 << 20
"""Bytes that are pinned at a time, unless one tensor is larger."""
_ALIGN = 256
_HOST = torch.device("cpu")
_LOCATIONS: tuple[Location, ...] = ("device", "host")


@dataclass(frozen=True, slots=True)
class BaseBytes:
    """Bytes of the frozen parameters that all snapshots share: in total, and still to be allocated."""

    total: int = 0
    to_allocate: Mapping[torch.device, int] = field(default_factory=dict)
    """By device, if snapshots are on the device."""
    to_allocate_on_host: int = 0
    """If snapshots are in host memory."""


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """Where snapshots are and how many; `location` is None if there is no room, and `reason` says why."""

    location: Location | None
    count: int
    reason: str


def plan_snapshots(
    nbytes: Mapping[torch.device, int], budget: int | None, count: int, base: BaseBytes | None = None
) -> SnapshotPlan:
    """Find room for `count` or fewer snapshots of a run with `nbytes` on each device, and for their shared base.

    Device memory is tried first, then host memory; all snapshots together stay within the budget and within half of
    the free memory.
    """
    base = base or BaseBytes()
    total, host = sum(nbytes.values()), free_bytes(_HOST)
    devices = {*nbytes, *base.to_allocate}
    free = {device: free_bytes(device) for device in devices}
    on_cuda = any(device.type == "cuda" for device in devices)
    shared = f" plus {format_bytes(base.total)} of frozen parameters" if base.total else ""

    def fits(location: Location, n: int) -> bool:
        if budget is not None and n * total + base.total > budget:
            return False
        if location == "host":
            return on_cuda and n * total + base.to_allocate_on_host <= host / 2
        return all(n * nbytes.get(d, 0) + base.to_allocate.get(d, 0) <= free[d] / 2 for d in devices)

    for enough in range(min(count, ENOUGH_SNAPSHOTS), MIN_SNAPSHOTS - 1, -1):
        fitting: list[Location] = [location for location in _LOCATIONS if fits(location, enough)]
        if fitting:
            location = fitting[0]
            n = max(n for n in range(enough, count + 1) if fits(location, n))
            where = "on the model's device" if location == "device" else "in host memory"
            reason = f"{n} of {format_bytes(total)} each{shared}" + (f" ({count} do not fit)" if n < count else "")
            return SnapshotPlan(location, n, f"{reason}, {where}")
    snapshots = f"{MIN_SNAPSHOTS} snapshots of {format_bytes(total)}{shared}"
    if budget is not None and MIN_SNAPSHOTS * total + base.total > budget:
        return SnapshotPlan(None, 0, f"{snapshots} do not fit in the budget of {format_bytes(budget)}")
    available = ", ".join(f"{format_bytes(room)} on {device}" for device, room in {**free, _HOST: host}.items())
    return SnapshotPlan(None, 0, f"{snapshots} do not fit in half of the free memory ({available})")


def free_bytes(device: torch.device) -> int:
    """Free memory; what torch has cached on a GPU is not counted, since the next forward pass will need it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [limit for limit in (_host_available(), _cgroup_available()) if limit is not None]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(limits, default=sys.maxsize) // processes


def _host_available() -> int | None:
    """None if the system does not say: running out of memory is also noticed when a snapshot is taken."""
    try:
        return 1024 * _first_numbers(Path("/proc/meminfo"))["MemAvailable:"]
    except (OSError, KeyError, ValueError):
        return None


def _cgroup_available() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        return limit - used + _first_numbers(root / "memory.stat")["inactive_file"]  # reclaimable page cache
    except (OSError, KeyError, ValueError):  # no container, or one without a limit
        return None


def _first_numbers(file: Path) -> dict[str, int]:
    """The first number on each line of a file whose lines begin with a name."""
    words = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in words}


def format_bytes(nbytes: float) -> str:
    """A number of bytes with its unit, such as 1.5 GB."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


# -- pinned host memory


class PinnedPages:
    """A block of pinned host memory, unpinned when this object is garbage collected."""

    def __init__(self, nbytes: int) -> None:
        pages = mmap.mmap(-1, max(nbytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # not supported by the system
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self.memory.numpy().fill(0)  # maps the pages; NumPy releases the GIL meanwhile
        pin(self.memory)
        weakref.finalize(self, unpin, self.memory)


def pin(memory: Tensor) -> None:
    """Register mapped memory with the CUDA driver."""
    driver: Any = torch.cuda.cudart()
    torch.cuda.check_error(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(memory: Tensor) -> None:
    """Unregister the memory once no transfer is in progress."""
    with contextlib.suppress(Exception):  # the driver may be gone at process exit
        torch.cuda.synchronize()
        driver: Any = torch.cuda.cudart()
        driver.cudaHostUnregister(memory.data_ptr())


def pinned_like(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[PinnedPages]]:
    """Pinned tensors of the same shapes, and the pages they lie on, which must be kept as long as they are used."""
    pinned: list[Tensor] = []
    pages: list[PinnedPages] = []
    for chunk in _chunks(tensors):
        raise_if_exiting()
        block = PinnedPages(sum(_aligned_size(t) for t in chunk))
        pages.append(block)
        offset = 0
        for t in chunk:
            flat = block.memory[offset : offset + t.nbytes].view(t.dtype)
            pinned.append(flat.as_strided(t.shape, torch.empty_like(t, device="meta").stride()))
            offset += _aligned_size(t)
    return pinned, pages


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for t in tensors:
        if chunk and size + _aligned_size(t) > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(t)
        size += _aligned_size(t)
    if chunk:
        yield chunk


def _aligned_size(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN

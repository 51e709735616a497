"""What torchrun starts: surefoot, bound to this process's share of the host's cores.

torchrun ends with 1 whatever its processes ended with. So each leaves its exit code in the folder SUREFOOT_CODES, where
torchrun.sh looks; and one that said "bad usage" (2) or "do not restart me" (76) says so again when it is restarted.

    torchrun --nproc-per-node 8 examples/launch/bound.py train RECIPE [key=value ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

FINAL = ("2", "76")


def place(core: int) -> tuple[int, int, int]:
    """Where a core sits: socket, physical core, thread; so that neighbours in this order share caches."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        socket = int((topology / "physical_package_id").read_text())
        return socket, int((topology / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core


def share(cores: Iterable[int], local: int, processes: int) -> set[int]:
    """The cores of process number `local`: neighbours, and as many for each; all of them if there are too few."""
    ordered = sorted(cores, key=place)
    each = len(ordered) // processes
    return set(ordered[local * each : (local + 1) * each]) or set(ordered)


def code_of(error: SystemExit) -> int:
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def main() -> None:
    environment = os.environ
    local, processes = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share(os.sched_getaffinity(0), local, processes))
    folder = environment.get("SUREFOOT_CODES")
    left = Path(folder) / environment.get("RANK", "0") if folder else None
    if left is not None and left.exists():
        if left.read_text().strip() in FINAL:
            sys.exit(int(left.read_text()))
        left.unlink()
    code = 1  # what Python itself ends with after an error
    try:
        sys.argv[0] = "surefoot"
        runpy.run_module("surefoot", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = code_of(error)
        raise
    finally:
        if left is not None:
            left.write_text(f"{code}\n")


if __name__ == "__main__":
    main()

"""Started by torchrun: runs surefoot, pinned to this rank's share of the host's cores.

torchrun exits with 1 whatever its processes exited with. So each rank writes its exit code to SUREFOOT_CODES, a folder
that torchrun.sh reads; a rank that exited with 2 (bad usage) or 76 (do not restart) repeats that code when restarted.

    torchrun --nproc-per-node 8 examples/launch/bound.py train RECIPE [key=value ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

FINAL = ("2", "76")


def topology_key(core: int) -> tuple[int, int, int]:
    """Sort key (socket, physical core, thread): neighbours in this order share caches."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        socket = int((topology / "physical_package_id").read_text())
        return socket, int((topology / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core


def cores_of(cores: Iterable[int], local_rank: int, processes: int) -> set[int]:
    """An equal block of neighbouring cores for this rank; all cores if there are fewer than ranks."""
    ordered = sorted(cores, key=topology_key)
    count = len(ordered) // processes
    return set(ordered[local_rank * count : (local_rank + 1) * count]) or set(ordered)


def exit_code(error: SystemExit) -> int:
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def main() -> None:
    environment = os.environ
    local_rank, processes = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores_of(os.sched_getaffinity(0), local_rank, processes))
    folder = environment.get("SUREFOOT_CODES")
    code_file = Path(folder) / environment.get("RANK", "0") if folder else None
    if code_file is not None and code_file.exists():
        if code_file.read_text().strip() in FINAL:
            sys.exit(int(code_file.read_text()))
        code_file.unlink()
    code = 1  # Python's own exit code after an error
    try:
        sys.argv[0] = "surefoot"
        runpy.run_module("surefoot", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = exit_code(error)
        raise
    finally:
        if code_file is not None:
            code_file.write_text(f"{code}\n")


if __name__ == "__main__":
    main()

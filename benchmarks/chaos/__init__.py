"""`surefoot bench chaos`: kills real training runs, breaks their disks and corrupts their files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.corruption import corrupt_files, plant_code, shift_clocks
from benchmarks.chaos.disk_faults import crash_at_every_write, failing_disks
from benchmarks.chaos.fork_server import ForkServer
from benchmarks.chaos.interruptions import kill_runs, reshard_runs, resume_combinations, signal_runs
from benchmarks.chaos.trials import ChaosBench, FaultTally


@dataclass(frozen=True, slots=True)
class ChaosFault:
    """A kind of fault and how many trials it gets; 0 tries every case."""

    run: Callable[[ChaosBench, int], FaultTally]
    quick_trials: int
    full_trials: int


FAULTS = {
    "kill": ChaosFault(kill_runs, 10, 300),
    "crash": ChaosFault(crash_at_every_write, 0, 0),
    "damage": ChaosFault(corrupt_files, 200, 5000),
    "disk": ChaosFault(failing_disks, 8, 60),
    "signal": ChaosFault(signal_runs, 4, 50),
    "clock": ChaosFault(shift_clocks, 4, 8),
    "code": ChaosFault(plant_code, 0, 0),
    "resume": ChaosFault(resume_combinations, 8, 96),
    "reshard": ChaosFault(reshard_runs, 6, 6),
}


def main(
    *,
    only: str = "",
    quick: bool = False,
    times: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> list[FaultTally]:
    """Try all faults, or one of them; the folder of a fault that lost a run is kept."""
    if only and only not in FAULTS:
        raise ValueError(f"bench chaos: --only {only} is unknown. Use one of {', '.join(FAULTS)}.")
    tallies: list[FaultTally] = []
    for name, fault in FAULTS.items():
        if only not in ("", name):
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"surefoot-chaos-{name}-"))
        with ForkServer() as server:
            trials = times if times is not None else fault.quick_trials if quick else fault.full_trials
            tally = fault.run(ChaosBench(folder, server, seed=seed), trials)
        tallies.append(tally)
        say(f"{name}: {tally.survived} of {tally.tried} survived")
        for failure in tally.lost:
            say(f"  lost: {failure}")
        if not tally.lost:
            shutil.rmtree(folder)
    return tallies

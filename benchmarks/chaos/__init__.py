"""`surefoot bench chaos`: real runs, really killed, on disks that fail and with files that are harmed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.corruption import clocks, damages, planted
from benchmarks.chaos.disk_faults import crashes, disks
from benchmarks.chaos.fork_server import Nursery
from benchmarks.chaos.interruptions import combinations, kills, reshards, signals
from benchmarks.chaos.trials import Bench, Tally


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a run, and how often it is tried; 0 is every case there is."""

    try_it: Callable[[Bench, int], Tally]
    quick: int
    long: int


FAULTS = {
    "kill": Fault(kills, 10, 300),
    "crash": Fault(crashes, 0, 0),
    "damage": Fault(damages, 200, 5000),
    "disk": Fault(disks, 8, 60),
    "signal": Fault(signals, 4, 50),
    "clock": Fault(clocks, 4, 8),
    "code": Fault(planted, 0, 0),
    "resume": Fault(combinations, 8, 96),
    "reshard": Fault(reshards, 6, 6),
}


def main(
    *,
    only: str = "",
    quick: bool = False,
    times: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> list[Tally]:
    """Try the faults, or one of them, and tell what came of it; what was lost keeps its folder."""
    if only and only not in FAULTS:
        raise ValueError(f"bench chaos: --only {only} is unknown. Use one of {', '.join(FAULTS)}.")
    found: list[Tally] = []
    for name, fault in FAULTS.items():
        if only not in ("", name):
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"surefoot-chaos-{name}-"))
        with Nursery() as nursery:
            count = times if times is not None else fault.quick if quick else fault.long
            tally = fault.try_it(Bench(folder, nursery, seed=seed), count)
        found.append(tally)
        say(f"{name}: {tally.survived} of {tally.tried} survived")
        for lost in tally.lost:
            say(f"  lost: {lost}")
        if not tally.lost:
            shutil.rmtree(folder)
    return found

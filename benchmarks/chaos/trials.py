"""What all chaos faults share: runs to try them on, an uninterrupted run to compare with, and the tally of trials."""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.chaos.fork_server import ForkServer
from benchmarks.chaos.training_run import RunPlan
from surefoot.checkpoint.store import CheckpointStore
from surefoot.checkpoint.store.manifest import NAME


@dataclass(slots=True)
class FaultTally:
    """How often a fault was tried, and which trials lost their run."""

    fault: str
    passes: str
    """The condition for a trial to count as survived."""
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def survived(self) -> int:
        return self.tried - len(self.lost)

    def record(self, error: str, trial: str) -> None:
        """Count one trial; a non-empty error means that it lost its run."""
        self.tried += 1
        if error:
            self.lost.append(f"{trial}: {error}"[:2000])


@dataclass(frozen=True, slots=True)
class LossRecord:
    """What a run left beside its folder, per rank: every loss by step, and the hashes of the final state."""

    losses: list[dict[str, str]]
    ends: list[dict[str, str]]
    mismatch: str = ""
    """Message when a step was done twice with different losses."""


class ChaosBench:
    """A folder for runs, and the fork server that starts them."""

    def __init__(
        self, folder: Path, fork_server: ForkServer, *, seed: int = 0, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self.fork_server, self.say = folder, fork_server, say
        self.rng = random.Random(seed)
        self._runs = 0
        self.reference = cache(self._reference)

    def new_run_path(self, name: str) -> str:
        """A path for a new run directory."""
        self._runs += 1
        return str(self.folder / f"{name}-{self._runs:04d}")

    def run_to_end(self, plan: RunPlan, world: int = 1, seconds: float = 120.0) -> list[int]:
        """Let a run finish by itself and return the exit codes of its ranks."""
        ranks = self.fork_server.start_ranks(plan, world)
        return [process.wait(seconds) for process in ranks]

    def _reference(self, plan: RunPlan, world: int) -> LossRecord:
        plan = replace(plan, run=self.new_run_path("bare"))
        if codes := [code for code in self.run_to_end(plan, world) if code]:
            raise RuntimeError(f"an uninterrupted run exited with {codes}: {log_tail(plan)}")
        return read_losses(plan, world)

    def uninterrupted(self, plan: RunPlan, world: int) -> LossRecord:
        """The losses of the same run without checkpoints and without faults."""
        bare = RunPlan(
            run="",
            mode="bare",
            steps=plan.steps,
            precision=plan.precision,
            accumulate=plan.accumulate,
            strategy=plan.strategy,
            batch=plan.batch,
        )
        return self.reference(bare, world)

    def compare(self, plan: RunPlan, world: int = 1) -> str:
        """The first difference from the uninterrupted run; empty when every bit is equal."""
        resumed, reference_run = read_losses(plan, world), self.uninterrupted(plan, world)
        if resumed.mismatch:
            return resumed.mismatch
        for rank, (a, b) in enumerate(zip(resumed.losses, reference_run.losses, strict=True)):
            differing = [step for step in b if a.get(step) != b[step]]
            if differing or a.keys() - b.keys():
                return f"the loss of step {(differing or sorted(a.keys() - b.keys()))[0]} on rank {rank} differs"
        for a, b in zip(resumed.ends, reference_run.ends, strict=True):
            differing = [part for part in b if a.get(part) != b[part]]
            if differing:
                return f"in the final state {', '.join(differing)} differ"
        return ""


def read_losses(plan: RunPlan, world: int) -> LossRecord:
    losses, ends, mismatch = [], [], ""
    for rank in range(world):
        by_step: dict[str, str] = {}
        for step, loss, _ in loss_lines(plan, rank):
            if by_step.setdefault(step, loss) != loss:
                mismatch = f"step {step} had another loss when it was repeated"
        losses.append(by_step)
        end = Path(f"{plan.run}.end-{rank}")
        ends.append(json.loads(end.read_text()) if end.exists() else {})
    return LossRecord(losses, ends, mismatch)


def loss_lines(plan: RunPlan, rank: int = 0) -> list[tuple[str, str, int]]:
    """Step, loss and time of each batch so far, as logged by this rank."""
    path = Path(f"{plan.run}.losses-{rank}")
    if not path.exists():
        return []
    fields = [line.split() for line in path.read_text().splitlines()]
    return [(f[0], f[1], int(f[2])) for f in fields if len(f) == 3]


def last_step(plan: RunPlan) -> int:
    """The last update that the run logged."""
    lines = loss_lines(plan)
    return int(lines[-1][0].split(".")[0]) if lines else 0


def steps_during_save(plan: RunPlan, name: str, step: int) -> int:
    """How many steps the loop went on before this checkpoint was written."""
    sealed = (Path(plan.run) / "checkpoints" / name / NAME).stat().st_mtime_ns
    times = [(when, int(at.split(".")[0])) for at, _, when in loss_lines(plan)]
    before = bisect_right(times, (sealed, 1 << 60))
    return max(0, times[before - 1][1] - step) if before else 0


def store_of(plan: RunPlan) -> CheckpointStore:
    return CheckpointStore(Path(plan.run) / "checkpoints")


def log_tail(plan: RunPlan, world: int = 2) -> str:
    """The last output of the run's processes."""

    logs = [Path(f"{plan.run}.log-{rank}") for rank in range(world)]
    return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs if log.exists())


def checkpoint_events(plan: RunPlan) -> list[dict[str, Any]]:
    import surefoot.journal.reader as reader

    return [e for e in reader.read(Path(plan.run)).events if e["kind"] == "checkpoint"]

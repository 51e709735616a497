"""Run by torchrun with two ranks: both rewind together, to a snapshot that both have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from rewind_runs import same
from scripted_judge import Watched, script
from two_rank_snapshots import build, contents

import surefoot
from surefoot.records import Action, StepOverrides

KINDS = ("ddp", "ddp fused", "fsdp2", "fsdp2 fused", "zero")


def watched(kind: str) -> Watched:
    run = build(kind)
    run.__class__ = Watched
    assert isinstance(run, Watched)
    return run


def attached(kind: str, where: Path, plan: dict[int, dict[str, Any]]) -> tuple[Watched, Any, Any]:
    run = watched(kind)
    guard = surefoot.attach(
        run.model, run.optimizer, run_dir=where, policy=surefoot.Policy(snapshot_every=4), scheduler=run.schedulers
    )
    run.watch = guard.watch
    return run, guard, script(guard, plan)


def trial(kind: str, lacking: bool, out: Path) -> dict[str, Any]:
    """Rewind at the end of attempt 11: to the snapshot of attempt 7, or of 3 where one rank lacks the newer one."""
    rank, rewound_to = dist.get_rank(), 3 if lacking else 7
    run, guard, judge = attached(kind, out / f"{kind}-{lacking}", {9: {"action": Action.REWIND}})
    for i in range(12):
        run.train(2 * i + rank, 1.0 if i < 8 else 30.0)
        if lacking and rank == 1 and i == 9:
            guard._recovery.ring._forget(guard._recovery.ring.snapshots[-1])
    for i in range(12, 16):
        run.train(2 * i + rank)
    twin = watched(kind)
    for i in [*range(rewound_to + 1), *range(12, 16)]:
        twin.train(2 * i + rank)
    guard.close()
    return {
        "rewinds": judge.rewinds,
        "on": same(contents(twin), contents(run)),
        "step": guard.step,
        "lost": guard.disabled,
    }


def lowered_lr_matches_manual_lr(kind: str, out: Path) -> bool:
    """A factor on the lr reaches a sharded optimizer, and the loop never sees it."""
    rank = dist.get_rank()
    run, guard, _ = attached(kind, out / f"{kind}-rate", {2: {"overrides": StepOverrides(lr_factor=0.5)}})
    for i in range(8):
        run.train(2 * i + rank)
    guard.close()
    twin = watched(kind)
    groups = twin.optimizer.param_groups
    for i in range(8):
        original_lrs = [g["lr"] for g in groups]
        for g in groups:
            g["lr"] *= 0.5 if i > 4 else 1.0
        hook = twin.optimizer.register_step_post_hook(
            lambda *_, original_lrs=original_lrs: set_lrs(groups, original_lrs)
        )
        twin.train(2 * i + rank)
        hook.remove()
    return same(contents(twin), contents(run))


class PlantedClock:
    """A clock on which every snapshot takes as long as planted."""

    def __init__(self, seconds: float) -> None:
        self.cost = seconds

    def now(self) -> float:
        return 0.0

    def seconds(self, start: float, end: float) -> float:
        return self.cost


def snapshots_of_unlike_ranks(out: Path) -> dict[str, Any]:
    """A snapshot costs nothing on one rank and a second on the other, which has room for fewer, too."""
    run = watched("ddp")
    guard: Any = surefoot.attach(run.model, run.optimizer, run_dir=out / "unlike", scheduler=run.schedulers)
    run.watch = guard.watch
    recovery = guard._recovery
    recovery.snapshots.interval._clock = PlantedClock(float(dist.get_rank()))
    if dist.get_rank() == 1:
        recovery.ring.limit(5)
    attempts: list[int] = []
    for i in range(260):
        run.train(2 * i + dist.get_rank())
        if recovery.snapshots.last_attempt not in attempts:
            attempts.append(recovery.snapshots.last_attempt)
    held = [s.attempt for s in recovery.ring.snapshots]
    state = {
        "taken": attempts,
        "held": held,
        "size": recovery.ring.size,
        "proposed": recovery.snapshots.interval.proposed,
    }
    guard.close()
    return state | {"updates": recovery.snapshots.interval.updates}


def set_lrs(groups: list[dict[str, Any]], lrs: list[float]) -> None:
    for group, lr in zip(groups, lrs, strict=True):
        group["lr"] = lr


def run_with_one_unprotected_rank(out: Path) -> dict[str, Any]:
    """One rank loses its protection: the other cannot rewind, and neither hangs."""
    rank = dist.get_rank()
    run, guard, judge = attached("ddp", out / "lost", {9: {"action": Action.REWIND}})
    for i in range(14):
        if rank == 1 and i == 4:
            guard.disable(RuntimeError("planted"), "a test")
        run.train(2 * i + rank)
    guard.close()
    return {"failures": judge.failures, "rewinds": judge.rewinds}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = Path(sys.argv[1])
    results: dict[str, Any] = {kind: trial(kind, False, out) for kind in KINDS}
    results |= {f"{kind} lacking": trial(kind, True, out) for kind in ("ddp", "fsdp2")}
    results["rate"] = {kind: lowered_lr_matches_manual_lr(kind, out) for kind in ("ddp", "fsdp2", "zero")}
    results["unlike"] = snapshots_of_unlike_ranks(out)
    results["lost"] = run_with_one_unprotected_rank(out)
    (out / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

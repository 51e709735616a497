"""Failing disks: a crash before every single write in turn, and disks that are full, read-only, broken or hang."""

from __future__ import annotations

import itertools
import shutil
import signal
from dataclasses import replace

from benchmarks.chaos.training_run import RunPlan, side_file
from benchmarks.chaos.trials import ChaosBench, FaultTally, checkpoint_events, log_tail, loss_lines, store_of

CONCURRENT_RUNS = 4


def crash_at_every_write(bench: ChaosBench, count: int) -> FaultTally:
    """Kill a run before each single write to disk, from its resume to its last prune; count 0 tries all of them."""
    tally = FaultTally(
        "crash before every single write, flush and rename of a resume, a save and a prune of a whole run",
        "a checkpoint always loads and is never mixed; every eighth run is resumed to its end, bit-equal",
    )
    seed = RunPlan(run=bench.new_run_path("crash"), steps=30, save_every=4, mode="waiting")
    bench.run_to_end(seed)
    at = 0
    over = False
    step = 1
    while not over and (count == 0 or tally.tried < count):
        plans = []
        for k in range(CONCURRENT_RUNS):
            plan = replace(seed, run=bench.new_run_path("crash"), steps=37, disk_fault="crash", fault_at=at + k * step)
            _copy_run(seed, plan)
            plans.append((plan, bench.fork_server.start(plan)))
        for plan, process in plans:
            code = process.wait()
            if code != -signal.SIGKILL:
                over = True
                if code:
                    tally.record(log_tail(plan), f"before write {plan.fault_at}")
                continue
            tally.record(
                _check_loadable(plan) or _check_resume(bench, plan, full=tally.tried % 8 == 0),
                f"before write {plan.fault_at}, {plan.run}",
            )
            shutil.rmtree(plan.run)
        at += CONCURRENT_RUNS * step
    tally.notes.append(f"{at} writes to disk" if over else f"the first {at} writes to disk")
    return tally


def _copy_run(seed: RunPlan, plan: RunPlan) -> None:
    shutil.copytree(seed.run, plan.run)
    shutil.copy(f"{seed.run}.losses-0", f"{plan.run}.losses-0")


def _check_loadable(plan: RunPlan) -> str:
    store = store_of(plan)
    bad = [f"{c.name}: {c.problems}" for c in map(store.verify, store.all()) if c.problems or c.extra]
    newest = store.newest()
    return f"damaged: {bad}" if bad else "nothing can be loaded" if newest is None or newest.step < 30 else ""


def _check_resume(bench: ChaosBench, plan: RunPlan, *, full: bool) -> str:
    if not full:  # `_check_loadable` sees every one of these states; a full resume takes longer
        return ""
    codes = bench.run_to_end(replace(plan, disk_fault=""))
    return log_tail(plan) if any(codes) else bench.compare(plan)


def failing_disks(bench: ChaosBench, count: int) -> FaultTally:
    """Let the disk fail in the middle of a run, at a random write."""
    tally = FaultTally(
        "disk full, read-only, I/O error, a disk that hangs (injected below the store)",
        "training ends with unchanged losses, the failure is reported, an older checkpoint is intact",
    )
    kinds = ("full", "hangs", "read-only", "i/o")
    longest = 0.0
    for k in range(count):
        kind = kinds[k % len(kinds)]
        plan = RunPlan(
            run=bench.new_run_path("disk"),
            steps=60,
            save_every=6,
            pause=0.003,
            disk_fault=kind,
            fault_at=80 + bench.rng.randrange(80),
        )
        codes = bench.run_to_end(plan)
        while plan.fault_at and not any(codes) and not side_file(plan, "struck").exists():
            # On a busy machine fewer saves fit into the run, which then ends before that write.
            plan = replace(plan, run=bench.new_run_path("disk"), fault_at=plan.fault_at // 2)
            codes = bench.run_to_end(plan)
        error = log_tail(plan) if any(codes) else bench.compare(plan)
        if not error and store_of(plan).newest() is None:
            error = "no older checkpoint is intact"
        if not error and not any(event["name"] in ("failed", "trouble") for event in checkpoint_events(plan)):
            error = f"the failure was not reported: {log_tail(plan)}"
        longest = max(longest, _longest_step(plan))
        if not error:  # resume on a disk that works again
            after = replace(plan, disk_fault="", steps=70, pause=0.0)
            error = log_tail(plan) if any(bench.run_to_end(after)) else bench.compare(after)
        tally.record(error, f"{kind} from write {plan.fault_at}, {plan.run}")
    tally.notes.append(f"the longest step took {longest:.2f} s, including a pause of 0.003 s")

    return tally


def _longest_step(plan: RunPlan) -> float:
    times = [when for _, _, when in loss_lines(plan)]
    return max((b - a for a, b in itertools.pairwise(times)), default=0) / 1e9

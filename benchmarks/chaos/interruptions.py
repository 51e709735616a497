"""Interrupted processes: SIGKILL at random moments, signals with a grace time, and resumes in many configurations."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.training_run import RunPlan
from benchmarks.chaos.trials import (
    ChaosBench,
    FaultTally,
    last_step,
    log_tail,
    read_losses,
    steps_during_save,
    store_of,
)
from benchmarks.checkout import worker_env

READBACK_STEPS = 5
"""Updates after which metrics have been read back, so that a save can begin."""
GRACE_SECONDS = 5.0
_MODES = (("attach", 1), ("attach", 2), ("sync", 1), ("waiting", 2), ("checkpoints", 1), ("waiting", 1))
_DRAFT = re.compile(r"\.writing-step-(\d+)-")


def kill_runs(bench: ChaosBench, count: int) -> FaultTally:
    """Kill runs with SIGKILL at random moments, resume each time, and let them finish."""
    tally = FaultTally(
        "kill -9 at a random moment while saving every few steps, saves awaited or not, 1 and 2 ranks",
        "resumes, at most one interval lost, losses and final state bit-equal to an uninterrupted run",
    )
    max_lost = 0
    while tally.tried < count:
        mode, world = _MODES[
            bench.rng.randrange(len(_MODES)) if tally.tried >= 10 else (tally.tried // 2) % len(_MODES)
        ]
        kills = min(count - tally.tried, 2 if count <= 20 else 12)
        steps = 60 * kills
        plan = RunPlan(
            run=bench.new_run_path("kill"),
            mode=mode,
            steps=steps,
            save_every=bench.rng.choice((4, 10)),
            pause=0.006,
            strategy="ddp" if world > 1 else "none",
            workers=bench.rng.choice((0, 0, 2)) if count > 20 else 0,
        )
        for _ in range(kills):
            lost, error = _kill_once(bench, plan, world)
            max_lost = max(max_lost, lost)
            tally.record(error, f"{mode}, {world} ranks, {plan.run}")
        codes = bench.run_to_end(replace(plan, pause=0), world)
        error = "".join(f"exited with {code}: {log_tail(plan)}" for code in codes if code)
        if error := error or bench.compare(plan, world):
            tally.lost.append(f"{mode}, {world} ranks, after the last kill: {error}, {plan.run}")
    tally.notes.append(f"at most {max_lost} steps had to be repeated")
    return tally


def _kill_once(bench: ChaosBench, plan: RunPlan, world: int) -> tuple[int, str]:
    """Start the run and kill it; returns the steps lost and an error if these are too many."""
    first_step_file = Path(f"{plan.run}.begun-0")
    first_step_file.unlink(missing_ok=True)
    ranks = bench.fork_server.start_ranks(plan, world)
    if bench.rng.random() < 0.8:
        _wait_until(lambda: first_step_file.exists() or ranks[0].exit_code is not None)
    time.sleep(bench.rng.random() * 0.6)
    victim = bench.rng.choice(ranks)
    failed = [process.exit_code for process in ranks if process.exit_code not in (None, 0)]
    victim.kill()
    if world > 1:
        time.sleep(bench.rng.random() * 0.2)
        for process in ranks:
            process.kill()
    if failed:
        return 0, f"it had exited with {failed} before the kill: {log_tail(plan)}"
    return _count_lost_steps(plan)


def _count_lost_steps(plan: RunPlan) -> tuple[int, str]:
    store, last = store_of(plan), last_step(plan)
    newest = store.newest()
    step = 0 if newest is None else newest.step
    lost = max(0, last - step)
    drafts = [int(match[1]) for path in store.root.glob(".writing-*") if (match := _DRAFT.match(path.name))]
    during_last_save = 0 if newest is None else steps_during_save(plan, newest.name, step)
    during_open_save = max(0, last - max(drafts)) if drafts else 0
    allowed = plan.save_every + READBACK_STEPS + during_last_save + during_open_save
    return lost, "" if lost <= allowed else f"{lost} steps lost, and an interval was {allowed}"


def _wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


# -- signals


def signal_runs(bench: ChaosBench, count: int) -> FaultTally:
    """Send termination signals; the run has five seconds to save and exit."""
    tally = FaultTally(
        f"SIGTERM, SIGINT, SIGUSR1 with {GRACE_SECONDS:.0f} s grace, 1 rank, 2, and 2 under torchrun",
        "saves the current step before it exits; resumes bit-equal",
    )
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    for k in range(count):
        world = 1 if k % 2 == 0 else 2
        number = numbers[k // 2 % len(numbers)]
        torchrun = world == 2 and k % 4 == 1 and number == signal.SIGTERM
        plan = RunPlan(
            run=bench.new_run_path("signal"),
            steps=150 if world == 1 else 220,
            save_every=1000,
            pause=0.01 if world == 1 else 0.025,
            strategy="ddp" if world == 2 else "none",
        )
        error = signal_once(bench, plan, world, number, torchrun=torchrun)
        tally.record(error, f"{number.name}, {world} ranks{', torchrun' * torchrun}, {plan.run}")
    return tally


def signal_once(bench: ChaosBench, plan: RunPlan, world: int, number: signal.Signals, *, torchrun: bool) -> str:
    """Signal a run, kill it when the grace time is over, and resume it; returns an error or an empty string."""
    signal_step = bench.rng.randrange(20, 90)
    if torchrun:
        command = [sys.executable, "-m", "benchmarks.chaos", "torchrun", str(os.getpid())]
        command += ["--standalone", "--nproc-per-node", str(world), plan.as_json()]
        with open(f"{plan.run}.log-0", "ab") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=worker_env())
            try:
                _wait_until(lambda: last_step(plan) > signal_step or agent.poll() is not None)
                agent.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(GRACE_SECONDS)
            finally:
                agent.kill()  # its workers end with it
                agent.wait()
    else:
        ranks = bench.fork_server.start_ranks(plan, world)
        _wait_until(lambda: last_step(plan) > signal_step or ranks[0].exit_code is not None)
        for process in ranks if bench.rng.random() < 0.7 else [bench.rng.choice(ranks)]:
            process.send(number)
        _wait_until(lambda: all(process.exit_code is not None for process in ranks), GRACE_SECONDS)
        for process in ranks:
            process.kill()
        if not all(process.exit_code for process in ranks):
            return f"it exited with 0 despite the signal: {log_tail(plan)}"
    last = last_step(plan) + 1
    newest = store_of(plan).newest()
    if newest is None or newest.step != last or newest.about["kind"] != "emergency":
        saved = "nothing" if newest is None else newest.name
        return f"{saved} was saved, and the run was at step {last}: {log_tail(plan)}"
    codes = bench.run_to_end(replace(plan, pause=0.0), world)
    return log_tail(plan) if any(codes) else bench.compare(plan, world)


# -- resuming


def resume_combinations(bench: ChaosBench, count: int) -> FaultTally:
    """Resume runs that ended or were killed mid-epoch or at an epoch's end, with the same or other loader workers."""
    tally = FaultTally(
        "resume with combinations of workers, precision, accumulation, ranks, mid-epoch or at an epoch's end",
        "losses and weights bit-equal",
    )
    strategies = (("none", 1), ("ddp", 2), ("fsdp", 2))
    precisions = ("float32", "bfloat16", "float16")
    cases = list(itertools.product(strategies, precisions, (1, 3), (0, 2), (True, False), (False, True)))
    bench.rng.shuffle(cases)
    cases.sort(key=lambda case: case[0][1] == 2 and case[1] == "float16")  # the rarest last
    for (strategy, world), precision, accumulate, workers, mid_epoch, killed in cases[:count]:
        batches = -(-101 // (8 * world))
        stop = (2 * batches if not mid_epoch else 2 * batches - 5) // accumulate
        plan = RunPlan(
            run=bench.new_run_path("combined"),
            steps=stop + 12,
            save_every=4 if killed else 1000,
            strategy=strategy,
            precision=precision,
            accumulate=accumulate,
            workers=workers,
        )
        first = replace(plan, signal_after=(stop, signal.SIGKILL)) if killed else replace(plan, steps=stop)
        codes = bench.run_to_end(first, world)
        error = "" if killed or not any(codes) else log_tail(plan)
        codes = bench.run_to_end(replace(plan, workers=2 - workers if bench.rng.random() < 0.5 else workers), world)
        error = error or ("".join(f"{code}: {log_tail(plan)}" for code in codes if code) or bench.compare(plan, world))
        position = "mid-epoch" if mid_epoch else "at an epoch's end"
        case = f"{strategy}, {world} ranks, {precision}, accumulation {accumulate}, {workers} workers, {position}"
        tally.record(error, f"{case}, {'killed' if killed else 'ended'}, {plan.run}")
    return tally


def reshard_runs(bench: ChaosBench, count: int) -> FaultTally:
    """Resume runs under another parallel strategy than the one that saved them."""
    tally = FaultTally("saved by 1 process, DDP or FSDP2, and resumed under another of these", "the same weights")
    strategies = [("none", 1), ("ddp", 2), ("fsdp", 2)]
    pairs = [(a, b) for a in strategies for b in strategies if a != b]
    for (strategy, world), (other, other_world) in pairs[:count]:
        plan = RunPlan(run=bench.new_run_path("reshard"), steps=9, save_every=1000, strategy=strategy)
        codes = bench.run_to_end(plan, world)
        before = read_losses(plan, world).ends
        codes += bench.run_to_end(replace(plan, strategy=other), other_world)
        after = read_losses(plan, other_world).ends
        same_world = world == other_world
        same = [end["weights"] == before[rank if same_world else 0]["weights"] for rank, end in enumerate(after)]
        error = log_tail(plan) if any(codes) else "" if all(same) else "the weights differ"
        tally.record(error, f"{strategy} on {world} to {other} on {other_world}, {plan.run}")
    return tally

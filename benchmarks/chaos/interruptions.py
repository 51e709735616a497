"""Processes that end: pulled plugs at random moments, signals with a grace time, and every way to go on from there."""

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

from benchmarks.chaos.training_run import Plan
from benchmarks.chaos.trials import Bench, Tally, last_step, seen, store_of, under_way, words

READ_LATE = 5
"""Updates after which their numbers are known, and a save can begin."""
GRACE = 5.0
_WAYS = (("attach", 1), ("attach", 2), ("sync", 1), ("waiting", 2), ("checkpoints", 1), ("waiting", 1))
_DRAFT = re.compile(r"\.writing-step-(\d+)-")


def kills(bench: Bench, count: int) -> Tally:
    """kill -9 at random moments, as often as it takes; the run then goes on to its end."""
    tally = Tally(
        "kill -9 at a random moment while it saves every few steps, saves awaited or not, 1 and 2 processes",
        "goes on, at most one interval lost, losses and end bit-equal to an unkilled run",
    )
    most = 0
    while tally.tried < count:
        way, world = _WAYS[bench.dice.randrange(len(_WAYS)) if tally.tried >= 10 else (tally.tried // 2) % len(_WAYS)]
        several = min(count - tally.tried, 2 if count <= 20 else 12)
        steps = 60 * several
        plan = Plan(
            run=bench.new("kill"),
            way=way,
            steps=steps,
            every=bench.dice.choice((4, 10)),
            pause=0.006,
            spread="ddp" if world > 1 else "none",
            workers=bench.dice.choice((0, 0, 2)) if count > 20 else 0,
        )
        for _ in range(several):
            lost, wrong = _killed(bench, plan, world)
            most = max(most, lost)
            tally.take(wrong, f"{way}, {world} processes, {plan.run}")
        wrong = "".join(
            f"ended with {code}: {words(plan)}" for code in bench.live(replace(plan, pause=0), world) if code
        )
        if wrong := wrong or bench.compare(plan, world):
            tally.lost.append(f"{way}, {world} processes, after the last kill: {wrong}, {plan.run}")
    tally.notes.append(f"at most {most} steps had to be done again")
    return tally


def _killed(bench: Bench, plan: Plan, world: int) -> tuple[int, str]:
    """One life, and its end; how many steps it takes back, and what is wrong with that."""
    begun = Path(f"{plan.run}.begun-0")
    begun.unlink(missing_ok=True)
    team = bench.nursery.team(plan, world)
    if bench.dice.random() < 0.8:
        _until(lambda: begun.exists() or team[0].code is not None)
    time.sleep(bench.dice.random() * 0.6)
    first = bench.dice.choice(team)
    ended = [one.code for one in team if one.code not in (None, 0)]
    first.kill()
    if world > 1:
        time.sleep(bench.dice.random() * 0.2)
        for one in team:
            one.kill()
    if ended:
        return 0, f"it had ended before with {ended}: {words(plan)}"
    return _lost(plan)


def _lost(plan: Plan) -> tuple[int, str]:
    store, last = store_of(plan), last_step(plan)
    kept = store.newest()
    step = 0 if kept is None else kept.step
    lost = max(0, last - step)
    drafts = [int(found[1]) for path in store.root.glob(".writing-*") if (found := _DRAFT.match(path.name))]
    waited = 0 if kept is None else under_way(plan, kept.name, step)
    at_work = max(0, last - max(drafts)) if drafts else 0
    allowed = plan.every + READ_LATE + waited + at_work
    return lost, "" if lost <= allowed else f"{lost} steps lost, and an interval was {allowed}"


def _until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.005)


# -- signals


def signals(bench: Bench, count: int) -> Tally:
    """Signals with five seconds of grace."""
    tally = Tally(
        f"SIGTERM, SIGINT, SIGUSR1 with {GRACE:.0f} s grace, 1 process, 2, and 2 under torchrun",
        "saved before exit, at the step it was at; goes on bit-equal",
    )
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    for k in range(count):
        world = 1 if k % 2 == 0 else 2
        number = numbers[k // 2 % len(numbers)]
        runs = world == 2 and k % 4 == 1 and number == signal.SIGTERM
        plan = Plan(
            run=bench.new("signal"),
            steps=150 if world == 1 else 220,
            every=1000,
            pause=0.01 if world == 1 else 0.025,
            spread="ddp" if world == 2 else "none",
        )
        wrong = _signalled(bench, plan, world, number, torchrun=runs)
        tally.take(wrong, f"{number.name}, {world} processes{', torchrun' * runs}, {plan.run}")
    return tally


def _signalled(bench: Bench, plan: Plan, world: int, number: signal.Signals, *, torchrun: bool) -> str:
    """What is wrong with a run that was told to end, and killed when its grace time was over."""
    enough = bench.dice.randrange(20, 90)
    if torchrun:
        command = [sys.executable, "-m", "benchmarks.chaos", "torchrun", str(os.getpid())]
        command += ["--standalone", "--nproc-per-node", str(world), plan.as_json()]
        with open(f"{plan.run}.log-0", "ab") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                _until(lambda: last_step(plan) > enough or agent.poll() is not None)
                agent.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(GRACE)
            finally:
                agent.kill()  # and the processes it started end with it
                agent.wait()
    else:
        team = bench.nursery.team(plan, world)
        _until(lambda: last_step(plan) > enough or team[0].code is not None)
        for one in team if bench.dice.random() < 0.7 else [bench.dice.choice(team)]:
            one.send(number)
        _until(lambda: all(one.code is not None for one in team), GRACE)
        for one in team:
            one.kill()
        if not all(one.code for one in team):
            return f"it ended as if nothing had been: {words(plan)}"
    last = last_step(plan) + 1
    kept = store_of(plan).newest()
    if kept is None or kept.step != last or kept.about["kind"] != "emergency":
        return f"{'nothing' if kept is None else kept.name} was saved, and it was at step {last}: {words(plan)}"
    codes = bench.live(replace(plan, pause=0.0), world)
    return words(plan) if any(codes) else bench.compare(plan, world)


# -- going on


def combinations(bench: Bench, count: int) -> Tally:
    """Runs that end, or are killed, in the middle of an epoch or at its end, and go on with other workers."""
    tally = Tally(
        "resume at combinations of workers, precision, accumulation, processes, mid-epoch or at its end",
        "losses and weights bit-equal",
    )
    spreads = (("none", 1), ("ddp", 2), ("fsdp", 2))
    every = list(
        itertools.product(spreads, ("float32", "bfloat16", "float16"), (1, 3), (0, 2), (True, False), (False, True))
    )
    bench.dice.shuffle(every)
    every.sort(key=lambda one: one[0][1] == 2 and one[1] == "float16")  # the rarest last
    for (spread, world), precision, accumulate, workers, inside, killed in every[:count]:
        batches = -(-101 // (8 * world))
        stop = (2 * batches if not inside else 2 * batches - 5) // accumulate
        plan = Plan(
            run=bench.new("combined"),
            steps=stop + 12,
            every=4 if killed else 1000,
            spread=spread,
            precision=precision,
            accumulate=accumulate,
            workers=workers,
        )
        first = replace(plan, stop=(stop, signal.SIGKILL)) if killed else replace(plan, steps=stop)
        codes = bench.live(first, world)
        wrong = "" if killed or not any(codes) else words(plan)
        codes = bench.live(replace(plan, workers=2 - workers if bench.dice.random() < 0.5 else workers), world)
        wrong = wrong or ("".join(f"{code}: {words(plan)}" for code in codes if code) or bench.compare(plan, world))
        where = "mid-epoch" if inside else "at the end of an epoch"
        what = f"{spread}, {world} processes, {precision}, accumulation {accumulate}, {workers} workers, {where}"
        tally.take(wrong, f"{what}, {'killed' if killed else 'ended'}, {plan.run}")
    return tally


def reshards(bench: Bench, count: int) -> Tally:
    """Runs saved by so many processes, spread in one way, and taken up by others."""
    tally = Tally("saved by 1 process, DDP or FSDP2, and taken up by another of these", "the same weights")
    ways = [("none", 1), ("ddp", 2), ("fsdp", 2)]
    pairs = [(a, b) for a in ways for b in ways if a != b]
    for (spread, world), (other, number) in pairs[:count]:
        plan = Plan(run=bench.new("reshard"), steps=9, every=1000, spread=spread)
        codes = bench.live(plan, world)
        before = seen(plan, world).ends
        codes += bench.live(replace(plan, spread=other), number)
        after = seen(plan, number).ends
        same = [end["weights"] == before[rank if world == number else 0]["weights"] for rank, end in enumerate(after)]
        wrong = words(plan) if any(codes) else "" if all(same) else "the weights differ"
        tally.take(wrong, f"{spread} by {world} to {other} by {number}, {plan.run}")
    return tally

"""Disks that fail: at every single change in turn, full, read-only, broken, and silent."""

from __future__ import annotations

import itertools
import shutil
import signal
from dataclasses import replace

from benchmarks.chaos.common import Bench, Tally, events, lines, store_of, words
from benchmarks.chaos.victim import Plan, beside

AT_ONCE = 4


def crashes(bench: Bench, count: int) -> Tally:
    """A run killed before each single change of the disk, from its resume to its last prune; 0 tries all of them."""
    tally = Tally(
        "crash at every single write, flush and rename of a resume, a save and a prune, of a whole run",
        "never unloadable, never mixed; every eighth is let go on to its end, bit-equal",
    )
    seed = Plan(run=bench.new("crash"), steps=30, every=4, way="waiting")
    bench.live(seed)
    at = 0
    over = False
    step = 1
    while not over and (count == 0 or tally.tried < count):
        plans = []
        for k in range(AT_ONCE):
            plan = replace(seed, run=bench.new("crash"), steps=37, disk="crash", at=at + k * step)
            _copy(seed, plan)
            plans.append((plan, bench.nursery.start(plan)))
        for plan, victim in plans:
            code = victim.wait()
            if code != -signal.SIGKILL:
                over = True
                if code:
                    tally.take(words(plan), f"before change {plan.at}")
                continue
            tally.take(
                _loadable(plan) or _goes_on(bench, plan, full=tally.tried % 8 == 0),
                f"before change {plan.at}, {plan.run}",
            )
            shutil.rmtree(plan.run)
        at += AT_ONCE * step
    tally.notes.append(f"{at} changes of the disk" if over else f"the first {at} changes of the disk")
    return tally


def _copy(seed: Plan, plan: Plan) -> None:
    shutil.copytree(seed.run, plan.run)
    shutil.copy(f"{seed.run}.losses-0", f"{plan.run}.losses-0")


def _loadable(plan: Plan) -> str:
    store = store_of(plan)
    bad = [f"{kept.name}: {kept.problems}" for kept in map(store.verify, store.all()) if kept.problems or kept.extra]
    kept = store.newest()
    return f"damaged: {bad}" if bad else "nothing can be loaded" if kept is None or kept.step < 30 else ""


def _goes_on(bench: Bench, plan: Plan, *, full: bool) -> str:
    if not full:  # the next process is shown every one of these states, a whole life takes longer
        return ""
    codes = bench.live(replace(plan, disk=""))
    return words(plan) if any(codes) else bench.compare(plan)


def disks(bench: Bench, count: int) -> Tally:
    """Disks that go wrong in the middle of a run, at any change."""
    tally = Tally(
        "disk full, read-only, I/O error, a disk that hangs (stand-ins below the store)",
        "training goes on to its end without a word of it in the losses, told, older checkpoint whole",
    )
    kinds = ("full", "hangs", "read-only", "i/o")
    longest = 0.0
    for k in range(count):
        kind = kinds[k % len(kinds)]
        plan = Plan(run=bench.new("disk"), steps=60, every=6, pause=0.003, disk=kind, at=80 + bench.dice.randrange(80))
        codes = bench.live(plan)
        while plan.at and not any(codes) and not beside(plan, "struck").exists():
            # A busy machine makes fewer saves in as many steps, and has ended before that change.
            plan = replace(plan, run=bench.new("disk"), at=plan.at // 2)
            codes = bench.live(plan)
        wrong = words(plan) if any(codes) else bench.compare(plan)
        whole = store_of(plan).newest()
        if not wrong and whole is None:
            wrong = "no older checkpoint is whole"
        if not wrong and not any(event["name"] in ("failed", "trouble") for event in events(plan)):
            wrong = f"nobody was told: {words(plan)}"
        longest = max(longest, _stall(plan))
        if not wrong:  # on a disk that works again it goes on
            after = replace(plan, disk="", steps=70, pause=0.0)
            wrong = words(plan) if any(bench.live(after)) else bench.compare(after)
        tally.take(wrong, f"{kind} from change {plan.at}, {plan.run}")
    tally.notes.append(f"the longest step of all took {longest:.2f} s, with a pause of 0.003 s in each")
    return tally


def _stall(plan: Plan) -> float:
    times = [when for _, _, when in lines(plan)]
    return max((b - a for a, b in itertools.pairwise(times)), default=0) / 1e9

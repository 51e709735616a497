"""One run from its recipe to its end: processes meet, parts are made, the guard is attached, the loop runs."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from surefoot import parallel
from surefoot.data.data_error import DataError
from surefoot.guard.attach import Guard, attach
from surefoot.guard.validate import switched_off
from surefoot.train import exits, sinks
from surefoot.train.again import check_again, check_free
from surefoot.train.build import Parts, build, run_dir_of
from surefoot.train.console import Console
from surefoot.train.ended import Ended
from surefoot.train.ending import finite_mean, last_losses, shown
from surefoot.train.loop import train
from surefoot.train.recipe import Recipe, as_plain, policy_of, remarks
from surefoot.train.record import recorded
from surefoot.train.schedules import sparkline
from surefoot.train.spoken import Paper
from surefoot.train.telling import Telling
from surefoot.train.unwatched import Unwatched


@dataclass(frozen=True, slots=True)
class Given:
    """What was typed."""

    source: str
    overrides: tuple[str, ...] = ()
    quiet: bool = False
    """Standard output is for a program: words go to standard error."""


def run(recipe: Recipe, given: Given) -> Ended:
    """Train a recipe to its end; whatever happens comes back as a number and words."""
    ended = Ended(recipe.name, run_dir_of(recipe))
    began, world, building, lost = time.monotonic(), None, True, False
    try:
        with exits.restartable():
            sinks.check(recipe.log)
            world = parallel.init_distributed(recipe.device, recipe.parallel.timeout)
            ended.first = world.is_main
            odd = parallel.check_versions(world)
            check_again(recipe, ended.run_dir)
            if world.is_main and recipe.protection.policy != "off":
                check_free(ended.run_dir)
            parts = build(recipe, world)
            parts.notes.extend([*odd, *remarks(recipe)])
            if switched_off():
                parts.notes.append("SUREFOOT=off in the environment: nothing watches, clips or saves this run.")
            with attached(parts, given) as guard:
                building = False
                _train(parts, guard, given, ended)
        ended.code = exits.DONE
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        ended.code, lost = exits.code_for(error, building=building), exits.lost_another(error)
        ended.why = exits.words_for(error)
        if ended.code == exits.FAILED and not isinstance(error, DataError) and not exits.out_of_memory(error):
            traceback.print_exc()  # an error of the model's or the data's code: this says more than we could
    finally:
        ended.seconds = time.monotonic() - began
        if world is not None:
            parallel.shutdown(world, failed=lost or ended.code not in (exits.DONE, exits.RESTART))
    return ended


def attached(parts: Parts, given: Given, recipe: Recipe | None = None) -> Guard:
    """The guard on a run's parts; it goes on from the newest checkpoint in the run's directory."""
    recipe = recipe or parts.recipe
    wanted = recipe.protection
    if wanted.policy == "off" or switched_off():
        return Unwatched(parts.schedules[0], every=recipe.log.every, total=parts.total)
    policy = policy_of(recipe)
    told = recorded(
        recipe,
        source=given.source,
        overrides=given.overrides,
        data=parts.data,
        effective_batch=parts.effective_batch,
    )
    with told:
        return attach(
            parts.model,
            parts.optimizers,
            run_dir=run_dir_of(recipe),
            clip=wanted.clip,
            policy=policy,
            scheduler=parts.schedules,
            scaler=parts.precision.scaler,
            snapshot_memory=wanted.ring,
            loader=parts.data.train,
            resume=not policy.observe,
        )


def _train(parts: Parts, guard: Guard, given: Given, ended: Ended) -> None:
    recipe, world = parts.recipe, parts.world
    start = parts.step
    places = sinks.open_sinks(
        recipe.log,
        ended.run_dir,
        first=world.is_main,
        name=recipe.name,
        config=as_plain(recipe),
        resumed_at=start or None,
    )
    paper = Paper(sys.stderr) if given.quiet else None
    with Console(recipe, world.is_main, parts.total, rank=world.rank, paper=paper) as console:
        telling = Telling(console, places, parts.total, data=parts.data)
        unreadable = len(parts.data.unreadable)
        telling.listen(guard)
        console.begin(_facts(parts, ended.run_dir, start))
        for note in parts.notes:
            console.say(f"  note: {note}")
        try:
            if start >= parts.total:
                console.say(
                    f"This run is finished: all {parts.total} updates are made. To train on, raise steps; to begin "
                    f"anew, choose another run_dir."
                )
            else:
                train(parts, guard, telling)
            guard.close()
            telling.follow(guard)
            ended.unreadable = unreadable + parallel.all_reduce_sum(world, len(parts.data.unreadable) - unreadable)
            ended.code = exits.DONE
        finally:
            places.close(ended.code)
            _sum_up(parts, guard, telling, ended)
        if start >= parts.total:
            ended.loss, ended.held_out = last_losses(ended.run_dir)
        else:
            ended.shown = shown(parts, ended.run_dir)
        console.end(ended.summary())


def _facts(parts: Parts, run_dir: Path, start: int) -> dict[str, str]:
    recipe, data, world = parts.recipe, parts.data, parts.world
    rate = float(parts.schedules[0].base_lrs[0])
    tokens = "" if data.tokens is None else f", {data.tokens:,} tokens"
    weights = f"{parts.parameters / 1e6:.3g} M" if parts.parameters >= 1e6 else f"{parts.parameters:,}"
    many = "" if world.size == 1 else f" on {world.size} processes ({recipe.parallel.how})"
    return {
        "model": f"{recipe.model.factory}, {weights} parameters",
        "data": f"{recipe.data.kind}, {data.samples:,} samples{tokens}",
        "batch": f"{parts.effective_batch} samples an update ({recipe.batch.size} x {recipe.batch.accumulate}){many}",
        "numbers": f"{recipe.precision.compute} on {world.device}" + (", compiled" if recipe.speed.compile else ""),
        "rate": f"{rate:g} {recipe.schedule.name} {sparkline(recipe.schedule, rate, parts.total, 24)}",
        "updates": f"{parts.total:,}" + (f", going on from {start:,}" if start else ""),
        "kept in": str(run_dir),
    }


def _sum_up(parts: Parts, guard: Guard, telling: Telling, ended: Ended) -> None:
    ended.step = parts.step
    if ended.code == exits.DONE:  # else the guard has not read all
        ended.refused = max(0, parts.step - guard.step)
    ended.loss = finite_mean(guard.history[0])
    if ended.code == exits.DONE and parts.world.is_main and not isinstance(guard, Unwatched):
        with suppress(OSError, ValueError, KeyError):  # a journal that could not be written fails no finished run
            ended.loss = last_losses(ended.run_dir)[0]
    ended.held_out = telling.evaluations[-1][1] if telling.evaluations else None

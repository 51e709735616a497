"""One run from recipe to result: join the ranks, build the parts, attach the guard, train."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot import parallel
from surefoot.alarms.alarm_target import alarm_targets, redacted
from surefoot.data.data_error import DataError
from surefoot.guard.attach import Guard, attach
from surefoot.guard.validate import switched_off
from surefoot.sinks.console import PlainConsole, RunConsole
from surefoot.sinks.sink import SinkError, Sinks, check_installed, open_sinks
from surefoot.train import exit_codes
from surefoot.train.build import RunParts, build, run_dir_of
from surefoot.train.evaluate import step_fn_of
from surefoot.train.loop import train
from surefoot.train.memory_recovery import MemoryRecovery
from surefoot.train.recipe import Recipe, RecipeError, as_plain, policy_of, remarks
from surefoot.train.reporter import Reporter
from surefoot.train.result import RunResult, final_losses, finite_mean, summary_extras
from surefoot.train.run_record import check_not_in_use, check_resumable, run_record
from surefoot.train.schedules import sparkline
from surefoot.train.unprotected import UnprotectedGuard


@dataclass(frozen=True, slots=True)
class Invocation:
    """The command line of a run."""

    source: str
    overrides: tuple[str, ...] = ()
    quiet: bool = False
    """Standard output is for a program: print progress to standard error."""


def run(recipe: Recipe, invocation: Invocation) -> RunResult:
    """Train a recipe to its end; errors come back as an exit code and a message."""
    result = RunResult(recipe.name, run_dir_of(recipe))
    start, world, building, lost_rank = time.monotonic(), None, True, False
    try:
        with exit_codes.restartable():
            check_installed(recipe.log)
            world = parallel.init_distributed(recipe.device, recipe.parallel.timeout)
            result.is_first = world.is_main
            inconsistencies = parallel.check_versions(world)
            check_resumable(recipe, result.run_dir)
            if world.is_main and recipe.protection.mode != "off":
                check_not_in_use(result.run_dir)
            parts = build(recipe, world)
            parts.notes.extend([*inconsistencies, *remarks(recipe)])
            if switched_off():
                parts.notes.append("SUREFOOT=off is set in the environment: the run is not watched, clipped or saved.")
            with attach_guard(parts, invocation) as guard:
                building = False
                _train(parts, guard, invocation, result)
        result.code = exit_codes.DONE
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, SinkError):
            error = RecipeError(str(error))
        result.code, lost_rank = exit_codes.code_for(error, building=building), exit_codes.is_lost_rank(error)
        result.error = exit_codes.message_for(error)
        lost_rank |= isinstance(error, exit_codes.OutOfMemoryRestart)  # the others are elsewhere
        expected = isinstance(error, DataError) or exit_codes.is_out_of_memory(error)
        if result.code == exit_codes.FAILED and not expected:
            traceback.print_exc()  # an error in the user's model or data code: the traceback says most
    finally:
        result.seconds = time.monotonic() - start
        if world is not None:
            failed = lost_rank or result.code not in (exit_codes.DONE, exit_codes.RESTART)
            parallel.shutdown(world, failed=failed)
    return result


def attach_guard(
    parts: RunParts, invocation: Invocation, recipe: Recipe | None = None, *, trial: bool = False
) -> Guard:
    """Attach the guard to a run's parts, resuming from the newest checkpoint in the run directory; a `trial` sends no
    alarms."""
    recipe = recipe or parts.recipe
    protection = recipe.protection
    if protection.mode == "off" or switched_off():
        return UnprotectedGuard(parts.schedules[0], every=recipe.log.every, total=parts.total)
    policy = policy_of(recipe)
    if parts.world.size > 1:
        policy = replace(policy, probe_every=0)  # step_fn is for trials only
    alarms = False if trial else recipe.alarms or None
    record = run_record(
        recipe,
        source=invocation.source,
        overrides=invocation.overrides,
        data=parts.data,
        effective_batch=parts.effective_batch,
    )
    return attach(
        parts.model,
        parts.optimizers,
        run_dir=run_dir_of(recipe),
        clip=protection.clip,
        policy=policy,
        scheduler=parts.schedules,
        scaler=parts.precision.scaler,
        snapshot_memory=protection.snapshot_memory,
        loader=parts.data.train_loader,
        resume=not policy.observe,
        step_fn=step_fn_of(parts),
        run_info=record,
        alarms=alarms,
        sinks=None if trial else recipe.log.sinks,
        cases=protection.cases,
    )


def _train(parts: RunParts, guard: Guard, invocation: Invocation, result: RunResult) -> None:
    recipe, world = parts.recipe, parts.world
    start = parts.step
    memory = MemoryRecovery(parts, guard)
    if (note := memory.resume(result.run_dir)) is not None:
        parts.notes.append(note)
    sinks = _open_sinks(parts, result.run_dir, start)
    with RunConsole(
        recipe.name,
        total_steps=parts.total,
        every=recipe.log.every,
        is_first=world.is_main,
        rank=world.rank,
        output=PlainConsole(sys.stderr) if invocation.quiet else None,
    ) as console:
        reporter = Reporter(console, sinks, parts.total, data=parts.data)
        unreadable = len(parts.data.unreadable)
        reporter.subscribe(guard)
        console.start(_header(parts, result.run_dir, start))
        for note in parts.notes:
            console.print(f"  note: {note}")
        try:
            if start >= parts.total:
                console.print(
                    f"This run is finished: all {parts.total} updates are made. To train longer, raise steps; to start "
                    f"a new run, choose another run_dir."
                )
            else:
                train(parts, guard, reporter, memory)
            guard.close()
            reporter.report_latest(guard)
            memory.failures_elsewhere = parallel.all_reduce_sum(world, memory.failures) - memory.failures
            result.unreadable = unreadable + parallel.all_reduce_sum(world, len(parts.data.unreadable) - unreadable)
            result.code = exit_codes.DONE
        finally:
            sinks.close(result.code)
            _fill_result(parts, guard, reporter, result)
            result.memory = memory.summary()
        if start >= parts.total:
            result.loss, result.eval_loss = final_losses(result.run_dir)
        else:
            result.extras = summary_extras(parts, result.run_dir)
        console.finish(result.summary())


def _open_sinks(parts: RunParts, run_dir: Path, start: int) -> Sinks:
    recipe = parts.recipe
    return open_sinks(
        recipe.log,
        run_dir,
        is_first=parts.world.is_main,
        name=recipe.name,
        config=redacted(as_plain(recipe), alarm_targets(recipe.alarms)),
        resumed_at=start or None,
    )


def _header(parts: RunParts, run_dir: Path, start: int) -> dict[str, str]:
    recipe, data, world = parts.recipe, parts.data, parts.world
    lr = float(parts.schedules[0].base_lrs[0])
    tokens = "" if data.tokens is None else f", {data.tokens:,} tokens"
    parameters = f"{parts.parameters / 1e6:.3g} M" if parts.parameters >= 1e6 else f"{parts.parameters:,}"
    ranks = "" if world.size == 1 else f" on {world.size} ranks ({recipe.parallel.strategy})"
    return {
        "model": f"{recipe.model.factory}, {parameters} parameters",
        "data": f"{recipe.data.kind}, {data.samples:,} samples{tokens}",
        "batch": f"{parts.effective_batch} samples per update ({recipe.batch.size} x {recipe.batch.accumulate}){ranks}",
        "precision": f"{recipe.precision.compute} on {world.device}" + (", compiled" if recipe.speed.compile else ""),
        "lr": f"{lr:g} {recipe.schedule.name} {sparkline(recipe.schedule, lr, parts.total, 24)}",
        "updates": f"{parts.total:,}" + (f", resuming from {start:,}" if start else ""),
        "run_dir": str(run_dir),
    }


def _fill_result(parts: RunParts, guard: Guard, reporter: Reporter, result: RunResult) -> None:
    result.step = parts.step
    if result.code == exit_codes.DONE:  # else the guard has not read every row
        result.refused = max(0, parts.step - guard.step)
    result.loss = finite_mean(guard.history[0])
    if result.code == exit_codes.DONE and parts.world.is_main and not isinstance(guard, UnprotectedGuard):
        with suppress(OSError, ValueError, KeyError):  # an unreadable journal does not fail a finished run
            result.loss = final_losses(result.run_dir)[0]
    result.eval_loss = reporter.evaluations[-1][1] if reporter.evaluations else None

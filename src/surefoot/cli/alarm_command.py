"""`surefoot alarms`: follow a run and send alarms about it, from any process or host that sees its directory."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from surefoot.alarms.alarm import Alarm, AlarmedRun
from surefoot.alarms.alarm_target import (
    ALARMS_VARIABLE,
    AlarmError,
    AlarmLevel,
    AlarmTarget,
    alarm_targets,
    targets_from_environment,
)
from surefoot.alarms.dispatcher import AlarmDispatcher
from surefoot.alarms.send_alarm import NotSent, send
from surefoot.alarms.sender_process import END_SECONDS, shortest_no_step
from surefoot.alarms.watch_run import POLL_SECONDS, RunEnd, RunWatch

_FINE, _FAILED, _USAGE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmOptions:
    """What the command was given."""

    to: tuple[str, ...] = ()
    levels: str = ""
    no_step: float | None = None
    test: bool = False


def show(run: Path | None, options: AlarmOptions) -> int:
    """Follow the run until it ends, or send a test alarm; returns the exit code."""
    try:
        targets = _targets(options)
        if options.test:
            return _test(targets, run)
        if run is None or not run.is_dir():
            raise AlarmError(
                "name the run directory to follow, such as runs/a, or send a test alarm with --test."
                if run is None
                else f"{run} is not a directory. Name the run_dir that was given to surefoot.attach."
            )
        return _follow(run, targets)
    except AlarmError as error:
        typer.echo(f"surefoot alarms: {error}", err=True)
        return _USAGE


def _targets(options: AlarmOptions) -> tuple[AlarmTarget, ...]:
    targets = alarm_targets([_address(given) for given in options.to]) if options.to else targets_from_environment()
    if not targets:
        raise AlarmError(
            f"no receiver is named. Set {ALARMS_VARIABLE}=https://... or give --to @FILE, --to https://... (which "
            "other users of this machine can read in the list of processes)."
        )
    if options.levels:
        wanted = alarm_targets({"to": "https://example.com", "levels": options.levels})[0].levels
        targets = tuple(replace(target, levels=wanted) for target in targets)
    if options.no_step is not None:
        targets = tuple(replace(target, no_step_minutes=options.no_step) for target in targets)
    return targets


def _address(given: str) -> object:
    """An address, or with @FILE what stands in a file: an address, or a mapping in JSON."""
    if not given.startswith("@"):
        return given
    try:
        text = Path(given[1:]).read_text(encoding="utf-8").strip()
        return json.loads(text) if text.startswith("{") else text
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is neither an address nor JSON"
        raise AlarmError(f"--to {given}: the file cannot be read: {reason}.") from None


def _test(targets: Sequence[AlarmTarget], run: Path | None) -> int:
    """One alarm to each receiver, with its answer."""
    alarm = Alarm(
        level=AlarmLevel.END,
        key="test",
        title="test alarm",
        text="This is a test of surefoot's alarms; nothing happened.",
    )
    code = _FINE
    for target in targets:
        try:
            send(target, alarm.payload(_facts(run or Path())))
            typer.echo(f"sent to {target.name}")
        except NotSent as why:
            typer.echo(f"not sent to {target.name}: {why}", err=True)
            code = _FAILED
    return code


def _facts(run: Path) -> AlarmedRun:
    path = run.resolve()
    return AlarmedRun(name=path.name, run_dir=str(path), host=socket.gethostname())


def _print_problem(sentence: str) -> None:
    typer.echo(f"surefoot alarms: {sentence}", err=True)


def _follow(run: Path, targets: Sequence[AlarmTarget]) -> int:
    watch = RunWatch(run, no_step_minutes=shortest_no_step(tuple(targets)))
    if not watch.has_writer:
        raise AlarmError(f"no process writes to {run}: its run has ended, or has not begun. Start it first.")
    dispatcher = AlarmDispatcher(
        targets, _facts(run), lambda sentence: typer.echo(f"surefoot alarms: {sentence}", err=True)
    )
    names = ", ".join(target.name for target in targets)
    typer.echo(f"following {run}; alarms go to {names}; Ctrl-C ends it")
    try:
        while watch.ended is None:
            for alarm in watch.poll():
                typer.echo(f"{time.strftime('%H:%M:%S')} {alarm.level.value:8} {alarm.title}")
                dispatcher.submit(alarm)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return _FINE
    dispatcher.close(END_SECONDS)
    return _FINE if watch.ended is RunEnd.CLOSED else _FAILED

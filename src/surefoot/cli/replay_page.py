"""`surefoot replay`: replays an incident and prints what came of it beside what was recorded."""

from __future__ import annotations

import math
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from surefoot.incidents.replay_bundle import IncidentReplay
from surefoot.journal.incident_folders import InvalidIncident
from surefoot.journal.strict_json import dumps
from surefoot.train.recipe import RecipeError
from surefoot.train.replay_incident import replay_recipe

SAME, DIFFERS, USAGE = 0, 1, 2
_LAST_STEPS = 8
"""Updates before the incident that are shown."""


def show(path: Path, *, recipe: str | None, device: str, as_json: bool) -> int:
    """Replay one bundle; 0 if everything comes out as recorded, 1 if not, 2 if it cannot be replayed."""
    try:
        result = replay_recipe(path, recipe, device)
    except (InvalidIncident, RecipeError, ValueError) as error:
        typer.echo(f"surefoot replay: {error}", err=True)
        return USAGE
    if as_json:
        typer.echo(dumps(result.as_json()))
    else:
        _print(result)
    return SAME if result.bit_equal else DIFFERS


def _print(result: IncidentReplay) -> None:
    console = Console(highlight=False)
    info = result.incident.info
    console.print(
        f"[bold]step {result.incident.step}, {result.incident.kind}[/]: {escape(str(info.get('reason', '')))}"
    )
    for event in info["events"]:
        if event.get("kind") == "diagnosis":
            cause, sure = str(event["cause"]).replace("_", " "), float(event["confidence"])
            console.print(f"  cause: {escape(cause)} ({sure:.0%} sure): {escape(str(event.get('detail', '')))}")
            break
    if result.steps:
        console.print("\nThe updates that led to it:")
        console.print(_steps_table(result))
    if result.branches:
        console.print("\nThe branches of its trial, by their loss on the probe batches:")
        console.print(_branches_table(result))
    if result.origin is not None:
        console.print(f"\n{escape(str(result.origin))}")
    if result.conclusion:
        console.print(f"\n{escape(result.conclusion)}")
    difference = result.largest_difference
    console.print(
        "\nAll as recorded, bit for bit." if result.bit_equal else f"\nLosses differ by up to {difference:.2g}."
    )


def _steps_table(result: IncidentReplay) -> Table:
    table = Table(box=None, padding=(0, 2))
    for heading in ("attempt", "loss", "recorded", "norm", "recorded"):
        table.add_column(heading, justify="right")
    for step in result.steps[-_LAST_STEPS:]:
        numbers = (step.loss, step.recorded_loss, step.norm, step.recorded_norm)
        table.add_row(str(step.attempt), *(_number(n) for n in numbers))
    return table


def _branches_table(result: IncidentReplay) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column("branch")
    for heading in ("loss", "recorded"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for branch in result.branches:
        chosen = "continued from" if branch.branch == result.best else ""
        table.add_row(branch.branch, _number(branch.probe_loss), _number(branch.recorded_probe_loss), chosen)
    return table


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6g}"

"""`surefoot plan`: prints the page of numbers of a run before it starts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from surefoot.data.data_error import DataError
from surefoot.journal.strict_json import dumps
from surefoot.plan.hardware import Cluster, parse_bytes, parse_count, parse_gpus
from surefoot.plan.make_plan import PlanRequest, make_plan
from surefoot.plan.page import WIDTH, page_text
from surefoot.plan.plan_error import PlanError
from surefoot.plan.settings_advice import STAGES
from surefoot.train import exit_codes
from surefoot.train.recipe import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of the command, as typed."""

    params: str | None = None
    seq: int | None = None
    gpus: str | None = None
    tokens: str | None = None
    stage: str = "pretrain"
    mfu: float = 0.4
    price: float | None = None
    network: str = "50GB"
    per_node: int = 8
    mtbf_hours: float = 50_000.0
    disk: str = "1GB"
    check: Path | None = None
    as_json: bool = False


def show(arguments: Sequence[str], options: PlanOptions) -> int:
    """Print the plan; 2 for what cannot be planned."""
    try:
        plan = make_plan(_request(arguments, options))
    except (PlanError, RecipeError, DataError, ValueError) as error:
        typer.echo(f"surefoot plan: {error}", err=True)
        return exit_codes.USAGE
    if options.as_json:
        typer.echo(dumps(plan.as_json()))
    else:
        verdict = textwrap.fill(f"{plan.recipe.name}: {plan.verdict}", WIDTH, break_on_hyphens=False)
        typer.echo(f"{verdict}\n\n{page_text(plan.sections)}")
    return exit_codes.DONE


def _request(arguments: Sequence[str], options: PlanOptions) -> PlanRequest:
    source = arguments[0] if arguments and "=" not in arguments[0] else None
    overrides = tuple(arguments[1:] if source else arguments)
    if options.stage not in STAGES:
        raise PlanError(f"--stage {options.stage}: expected one of {', '.join(STAGES)}")
    return PlanRequest(
        source=source,
        overrides=overrides,
        parameters=parse_count("--params", options.params) if options.params else None,
        seq=options.seq,
        cluster=_cluster(options),
        tokens=parse_count("--tokens", options.tokens) if options.tokens else None,
        stage=options.stage,
        mfu=options.mfu,
        price=options.price,
        hours_between_failures=options.mtbf_hours,
        disk=parse_bytes("--disk", options.disk),
        check=options.check,
    )


def _cluster(options: PlanOptions) -> Cluster | None:
    network = parse_bytes("--network", options.network)
    if options.gpus is None:
        return None
    return replace(parse_gpus(options.gpus), per_node=options.per_node, network=network)

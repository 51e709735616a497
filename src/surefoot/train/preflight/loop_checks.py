"""The checks of `surefoot.preflight` for a recipe: its model, optimizer, data and loss, built once more."""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.parallel import World
from surefoot.preflight_checks.findings import PreflightFinding
from surefoot.preflight_checks.preflight import preflight
from surefoot.train.build import build
from surefoot.train.evaluate import step_fn_of
from surefoot.train.preflight.report import CheckItem, failed, ok, skipped, warning
from surefoot.train.recipe import Recipe

NAME = "training loop"


def items(recipe: Recipe, world: World) -> Iterator[CheckItem]:
    """One item per finding, failed if it is sure; a single one if there is none."""
    if world.size > 1:
        yield skipped(NAME, "it is checked on a single rank", "Run surefoot check without torchrun once.")
        return
    parts = build(recipe, world)
    report = preflight(
        parts.model,
        parts.optimizers,
        parts.data.train_loader,
        step_fn_of(parts),
        scheduler=parts.schedules[0] if len(parts.optimizers) == 1 else None,
        total_steps=parts.total,
    )
    for finding in report.findings:
        yield _item(finding)
    if not report.findings:
        message = f"causality, labels, loss function, parameters and rate: nothing is wrong, in {report.seconds:.1f} s"
        yield ok(NAME, message, not_checked=dict(report.not_checked))


def _item(finding: PreflightFinding) -> CheckItem:
    make = failed if finding.sure else warning
    place = f" ({finding.where})" if finding.where else ""
    doubt = "" if finding.sure else "may be intended: "
    values = {"cause": str(finding.cause), **finding.as_json()["values"]}
    return make(f"loop: {finding.cause}", f"{doubt}{finding.what}{place}; {finding.how}", finding.fix, **values)

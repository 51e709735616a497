"""What `surefoot check --json` or an earlier run has measured: peak memory, speed, gradient norms."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.journal.reader import read
from surefoot.plan.memory_plan import Calibration, MemorySplit
from surefoot.plan.page import PageSection, format_bytes
from surefoot.plan.plan_error import PlanError
from surefoot.train.build import run_dir_of
from surefoot.train.preflight.journal_columns import applied, later_half
from surefoot.train.preflight.training_checks import normal_maximum
from surefoot.train.recipe import Recipe

_MIN_NORMS = 15
_CLIP_FACTOR = 2.5
"""The threshold is this factor times the normal maximum, as in surefoot check."""


@dataclass(frozen=True, slots=True)
class CheckMeasured:
    """Figures of a check's report; None where it did not measure."""

    source: str
    peak: float | None = None
    """Most bytes that torch had allocated on the GPU."""
    reserved: float | None = None
    samples_per_second: float | None = None
    clip: float | None = None


def read_check(path: Path) -> CheckMeasured:
    """The figures in what `surefoot check RECIPE --json` printed."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        figures = {str(item["name"]): dict(item["figures"]) for item in report["items"]}
    except OSError as error:
        raise PlanError(f"--check {path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise PlanError(
            f"--check {path}: not a report; write one with: surefoot check RECIPE --json > {path}"
        ) from None
    memory = figures.get("device memory", {})
    return CheckMeasured(
        str(path),
        peak=_number(memory.get("peak")),
        reserved=_number(memory.get("reserved")),
        samples_per_second=_number(figures.get("speed", {}).get("samples_per_s")),
        clip=_number(figures.get("clip threshold", {}).get("suggested")),
    )


def calibrate(check: CheckMeasured, planned: MemorySplit) -> Calibration | None:
    """Scale what comes and goes within a step until the planned peak, which is uncalibrated, is the measured one."""
    if check.peak is None or planned.within_step <= 0:
        return None
    fixed = planned.allocated - planned.within_step
    within = (check.peak - fixed) / planned.within_step
    if not 0.2 < within < 5:
        raise PlanError(
            f"--check {check.source}: its peak of {format_bytes(check.peak)} does not belong to this plan, which needs "
            f"{format_bytes(planned.allocated)}. Was it made with another recipe or number of GPUs?"
        )
    reserved = (check.reserved or check.peak) - check.peak
    return Calibration(within, max(0.0, reserved / (within * planned.within_step)), check.source)


def clip_section(recipe: Recipe, check: CheckMeasured | None) -> PageSection:
    """The clip threshold from measured norms, if there are any."""
    section = PageSection("clipping", "Clip threshold")
    run_dir = run_dir_of(recipe)
    if check is not None and check.clip is not None:
        how = f"{_CLIP_FACTOR:g} x the normal maximum of the norms in {check.source}"
        section.add("clip", "protection.clip", check.clip, f"{check.clip:g}", how)
        section.lines.append(f"protection.clip={check.clip:g}")
        return section
    norms = _norms_of_run(run_dir)
    if len(norms) >= _MIN_NORMS:
        maximum = normal_maximum(norms)
        clip = float(f"{_CLIP_FACTOR * maximum:.2g}")
        how = f"{_CLIP_FACTOR:g} x {maximum:.3g}, the normal maximum of {len(norms)} norms in {run_dir}"
        section.add("clip", "protection.clip", clip, f"{clip:g}", how)
        section.lines.append(f"protection.clip={clip:g}")
        return section
    clip = recipe.protection.clip
    text = "none" if clip is None else str(clip)
    how = "the recipe's; no norms were measured yet: surefoot check proposes one, and --check reads it"
    section.add("clip", "protection.clip", clip, text, how)
    return section


def _norms_of_run(run_dir: Path) -> np.ndarray:
    if not run_dir.is_dir():
        return np.empty(0)
    try:
        return later_half(applied(read(run_dir), "norm"))
    except (ValueError, OSError):
        return np.empty(0)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

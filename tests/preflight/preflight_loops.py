"""Small loops for the tests of preflight: each is healthy, and a test changes one thing of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot
from benchmarks.silent_bugs import tasks
from benchmarks.silent_bugs.loops import Loop
from surefoot.preflight_checks.findings import PreflightReport


def check(loop: Loop, **options: Any) -> PreflightReport:
    return surefoot.preflight(loop.model, loop.optimizer, loop.batches, loop.step_fn, **options)


def causes(report: PreflightReport) -> set[str]:
    return {str(finding.cause) for finding in report.findings}


def sure_causes(report: PreflightReport) -> set[str]:
    return {str(finding.cause) for finding in report.sure}


def regression(model: nn.Module | None = None, **options: Any) -> Loop:
    torch.manual_seed(0)
    return tasks.regression_loop(model, **options)


def decoder(model: nn.Module | None = None, **options: Any) -> Loop:
    torch.manual_seed(0)
    return tasks.decoder_loop(model, **options)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])

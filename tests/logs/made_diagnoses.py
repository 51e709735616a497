"""Handmade diagnoses for tests of reports and plots."""

from __future__ import annotations

from typing import Any

import numpy as np

from surefoot.logs.log_diagnosis import LogDiagnosis, RankedCause, RunHealth
from surefoot.logs.run_curves import RunCurves, Series
from surefoot.records import Cause, Pattern


def made_curves(points: int = 500, *, fails_at: int | None = None, seed: int = 0) -> RunCurves:
    """A noisy decreasing loss that is NaN from `fails_at` on."""
    random = np.random.default_rng(seed)
    steps = np.arange(points) * 10.0
    values = 2 + 8 * np.exp(-np.arange(points) / (points / 5)) + random.normal(0, 0.05, points)
    norm = np.abs(random.normal(1, 0.1, points))
    if fails_at is not None:
        values[fails_at:] = np.nan
        norm[fails_at:] = np.inf
    each = max(1, points // 10)
    return RunCurves(
        loss=Series("train/loss", steps, values),
        eval_loss=Series("val/loss", steps[::each], np.linspace(9, 2.4, len(steps[::each]))),
        grad_norm=Series("grad_norm", steps, norm),
        lr=Series("lr", steps, np.full(points, 1e-3)),
        loss_scale=Series("loss_scale", steps, np.full(points, 65536.0)),
    )


def healthy(**changes: Any) -> LogDiagnosis:
    fields = {
        "verdict": RunHealth.HEALTHY,
        "sentence": "Healthy: the loss fell from 10 to 2.",
        "last_step": 4990,
        "curves": made_curves(),
        "source": {
            "path": "good.csv",
            "format": "csv",
            "points": 500,
            "columns": {"loss": "train/loss"},
            "skipped": {},
        },
    }
    return LogDiagnosis(**(fields | changes))


def failed(**changes: Any) -> LogDiagnosis:
    fields = {
        "verdict": RunHealth.FAILED,
        "pattern": Pattern.NONFINITE,
        "sentence": "The loss turned NaN at step 4,000 and stayed so.",
        "onset_step": 4000,
        "last_step": 4990,
        "curves": made_curves(fails_at=400),
        "causes": (
            RankedCause(
                cause=Cause.LEARNING_RATE,
                confidence=0.7,
                evidence=("The norm rose from 1 to 900.", "The rate stood at 0.001."),
                advice=("Go back to a checkpoint before step 4,000.", "Halve the learning rate."),
            ),
            RankedCause(
                cause=Cause.BAD_BATCH,
                confidence=0.2,
                evidence=("The rise took one step.",),
                advice=("Halve the learning rate.", "Look at the batch of step 4,000."),
            ),
        ),
        "source": {
            "path": "bad.jsonl",
            "format": "jsonl",
            "points": 500,
            "columns": {"loss": "train/loss", "norm": "grad_norm"},
            "skipped": {"lines that are not JSON": 3},
        },
        "notes": ("the log holds two runs",),
    }
    return LogDiagnosis(**(fields | changes))

"""The batches: unlike those before, too small for batch norm, repeating, or slow to come."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, ClassVar

import numpy as np

from surefoot.judge.baselines import Baseline, pending_rows
from surefoot.judge.detectors.base import NOTHING, Detector, Findings, WatchingDetector
from surefoot.judge.evidence import BrokenBatch, InputDrift, NovelBatch, TimeEvidence
from surefoot.judge.signals import Sign, Signals
from surefoot.judge.thresholds import (
    BASELINE_ROWS,
    DOUBLE_RATIO,
    NOTABLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
    STRONG_RATIO,
    TREND_ROWS,
    TRIPLE_RATIO,
    WINDOW_ROWS,
    Thresholds,
)
from surefoot.records import FindingKind, Pattern, Severity, StepMetrics


class InputShift(WatchingDetector):
    """Compares mean, standard deviation and largest value of each batch with those of earlier batches."""

    kind: ClassVar = FindingKind.INPUT_SHIFT
    wakes_on: ClassVar = Sign.INPUTS
    state_names: ClassVar = ("_recent_means", "_reported", "_drifted", "_rows_since_novel", "_novel_rows")

    def __init__(self, thresholds: Thresholds) -> None:
        super().__init__()
        self._thresholds = thresholds
        self._means = Baseline(thresholds.slow_baseline_rows)
        self._log_stds = Baseline(thresholds.slow_baseline_rows)
        self._pending: deque[tuple[int, float, float]] = deque()
        """Attempt, mean and log std of batches that are not part of the baseline yet."""
        self._recent_means: list[float] = []
        self._reported = False
        self._drifted = False
        self._rows_since_novel = self._novel_rows = 0
        """Rows since the last novel batch, and novel batches in a row."""
        self.novelty = 0.0
        """How unlike earlier batches this one is; from 1 on it is reported."""

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        previous_novelty, self.novelty, self.watching = self.novelty, 0.0, False
        if row.optimizer or math.isnan(row.input_absmax):
            return NOTHING
        self.watching = True  # novelty is about one row
        if math.isinf(row.input_absmax):
            self.novelty, self._rows_since_novel = math.inf, 0
            return self.report(
                row, "the batch contains non-finite values", BrokenBatch(top=row.input_absmax, broken=True)
            )
        log_std = math.log(max(row.input_std, 1e-30))
        ready = len(self._means) >= self._thresholds.min_baseline_rows
        findings = self._compare(row, log_std, previous_novelty) if ready else NOTHING
        self._rows_since_novel = 0 if self.novelty >= 1 else self._rows_since_novel + 1
        self._novel_rows = self._novel_rows + 1 if self.novelty >= 1 else 0
        if self._novel_rows >= self._thresholds.baseline_rows:
            self._restart_baseline()
        if row.applied:
            self._add(row, log_std)
        return findings

    def _restart_baseline(self) -> None:
        """Batches that were novel for a whole baseline's length are normal from here on."""
        for baseline in (self._means, self._log_stds):
            baseline.drop_from(-1)
        self._pending.clear()
        self._recent_means, self._novel_rows, self._reported = [], 0, False

    def _add(self, row: StepMetrics, log_std: float) -> None:
        self._recent_means.append(row.input_mean)
        if len(self._recent_means) > WINDOW_ROWS:
            del self._recent_means[0]
        if self.novelty >= 1 and len(self._means) >= self._thresholds.min_baseline_rows:
            return
        self._pending.append((row.attempt, row.input_mean, log_std))
        if len(self._pending) > pending_rows(len(self._means)):
            attempt, mean, std = self._pending.popleft()
            self._means.add(attempt, mean)
            self._log_stds.add(attempt, std)

    def _compare(self, row: StepMetrics, log_std: float, previous_novelty: float) -> Findings:
        thresholds, std = self._thresholds, math.exp(self._log_stds.median)
        shift = abs(row.input_mean - self._means.median)
        widening = abs(log_std - self._log_stds.median)
        by_mean = min(
            shift / (thresholds.loss_jump_sigmas * self._means.sigma), shift / (thresholds.input_shift_sigmas * std)
        )
        by_std = min(
            widening / (thresholds.loss_jump_sigmas * max(self._log_stds.sigma, 1e-3)),
            widening / math.log(thresholds.input_std_ratio),
        )
        self.novelty = max(by_mean, by_std)
        if self.novelty < 1:
            self._reported = False
            return self._drift(row, std) if len(self._recent_means) == WINDOW_ROWS else NOTHING
        if self._reported:
            return NOTHING
        self._reported = True
        detail = (
            f"the batch is unlike those before: mean {row.input_mean:.3g} and std {row.input_std:.3g}, "
            f"where {self._means.median:.3g} and {std if std > 1e-12 else 0.0:.3g} are usual"
        )
        slowly = previous_novelty > self.novelty / 2
        evidence = NovelBatch(mean=row.input_mean, spread=row.input_std, usual=std, slowly=slowly)
        return self.report(row, detail, evidence)

    def _drift(self, row: StepMetrics, std: float) -> Findings:
        """The mean of the last 16 batches has moved away in small steps."""
        moved = abs(sum(self._recent_means) / WINDOW_ROWS - self._means.median)
        min_move = self._thresholds.loss_jump_sigmas * (self._means.sigma / math.sqrt(WINDOW_ROWS))
        if not (moved > min_move and moved > NOTABLE_FRACTION * std) or self._drifted:
            self._drifted = self._drifted and moved > min_move / 2
            return NOTHING
        self._drifted = True
        detail = f"the mean of the inputs has drifted by {moved:.3g}; their std is {std:.3g}"
        evidence = InputDrift(moved=moved, spread=std, slowly=self._rows_since_novel > WINDOW_ROWS)
        return self.report(row, detail, evidence)

    def rewound(self) -> None:
        self._reported = False

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "means": self._means.state_dict(),
            "spreads": self._log_stds.state_dict(),
            "waiting": [list(pending) for pending in self._pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._means.load_state_dict(state["means"])
        self._log_stds.load_state_dict(state["spreads"])
        self._pending = deque((int(attempt), mean, std) for attempt, mean, std in state["waiting"])


class TinyBatches(WatchingDetector):
    """Reports a model with batch norm that gets a few samples per batch where it used to get many."""

    kind: ClassVar = FindingKind.TINY_BATCHES
    wakes_on: ClassVar = Sign.FEW_SAMPLES
    state_names: ClassVar = ("_rows",)

    def __init__(self, signals: Signals, *, has_batch_norm: bool) -> None:
        super().__init__()
        self._signals = signals
        self._has_batch_norm = has_batch_norm
        self._rows = 0
        """Tiny batches in a row."""

    def rewound(self) -> None:
        self._rows = 0

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        usual = self._signals.batch_sizes.median
        tiny = 0 < row.samples <= RECENT_ROWS and DOUBLE_RATIO * row.samples <= usual
        self.watching = self._has_batch_norm and not row.optimizer and tiny
        if not self.watching:
            self._rows = 0
            return NOTHING
        self._rows += 1
        if self._rows != REPEAT_COUNT:  # a single one may be the last batch of an epoch
            return NOTHING
        detail = f"batch norm gets {row.samples:.0f} samples per batch, where it got {usual:.0f}"
        return self.report(row, detail, {"samples": row.samples, "usual": usual})


class RepeatedBatches(Detector):
    """Reports losses that come again in the same order, because the loader cycles through the same few batches.

    Such losses differ from one cycle to the next by their trend alone, where they used to differ by chance.
    """

    kind: ClassVar = FindingKind.REPEATED_BATCHES
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = Sign.UPDATE
    state_names: ClassVar = ("_losses", "_usual_scatter", "_rows", "_reported")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._losses: list[float] = []
        self._usual_scatter = math.nan
        """How far one loss usually differs from the next."""
        self._rows = 0
        self._reported = False

    def rewound(self) -> None:
        self._losses = []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if row.optimizer or not row.applied or not math.isfinite(row.loss):
            return NOTHING
        self._losses.append(row.loss)
        if len(self._losses) > BASELINE_ROWS:
            del self._losses[0]
        self._rows += 1
        # Only every 32 rows, because a check is slow, and not early: while a run learns fast, losses scatter unusually.
        if self._rows % TREND_ROWS or self._rows < 2 * BASELINE_ROWS or len(self._losses) < BASELINE_ROWS:
            return NOTHING
        losses = np.array(self._losses)
        scatters = [_scatter(losses[k:] - losses[:-k]) for k in range(1, WINDOW_ROWS + 1)]
        if math.isnan(self._usual_scatter):
            self._usual_scatter = scatters[0]
        period = int(np.argmin(scatters)) + 1
        scatter = scatters[period - 1]
        if not scatter < NOTABLE_FRACTION * self._usual_scatter:
            self._usual_scatter += (scatters[0] - self._usual_scatter) / 4
            self._reported = False
            return NOTHING
        if self._reported:
            return NOTHING
        self._reported = True
        detail = f"the same losses come back every {period} steps: the loader cycles through the same batches"
        evidence = {"period": period, "apart": scatter, "usual": self._usual_scatter}
        return self.report(row, detail, evidence, Pattern.OVERFIT)


class SlowSteps(Detector):
    """Reports steps that take far longer than they did, and whether they wait for data or for a checkpoint."""

    kind: ClassVar = FindingKind.SLOW_STEPS
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = Sign.SECONDS
    state_names: ClassVar = ("_rows", "_slow", "_waiting", "_saving", "_reported")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._seconds = Baseline(thresholds.slow_baseline_rows)
        self._waits = Baseline(thresholds.slow_baseline_rows)
        self._rows = 0
        self._slow = 0
        """Slow steps in a row, how many of them waited for data, and during how many a checkpoint was written."""
        self._waiting = self._saving = 0
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if row.optimizer or not row.seconds > 0:
            return NOTHING
        self._rows += 1
        if self._rows <= WINDOW_ROWS:  # compilation, caches and the allocator warm up
            return NOTHING
        thresholds = self._thresholds
        wait = row.data_wait if row.data_wait > 0 else 0.0
        ready = len(self._seconds) >= thresholds.min_baseline_rows
        usual, usual_wait = self._seconds.median, self._waits.median
        slow = ready and row.seconds > TRIPLE_RATIO * usual
        waits = ready and STRONG_RATIO * wait > row.seconds and wait > TRIPLE_RATIO * max(usual_wait, 1e-3)
        if not slow and not waits:
            self._slow = self._waiting = self._saving = 0
            self._reported = False
            self._seconds.add(row.attempt, row.seconds)
            self._waits.add(row.attempt, wait)
            return NOTHING
        self._slow += 1
        self._waiting += waits
        self._saving += row.saving > 0
        if self._slow < WINDOW_ROWS or self._reported:
            return NOTHING
        self._reported = True
        if self._waiting > self._slow / 2:
            detail = (
                f"steps spend {wait / row.seconds:.0%} of their time waiting for data; it was {usual_wait / usual:.0%}"
            )
            return self.report(row, detail, TimeEvidence(data=True, wait=wait, usual=usual_wait, seconds=row.seconds))
        detail = f"a step takes {row.seconds:.3g} s, {row.seconds / usual:.3g} times as long as before"
        bottleneck = ""
        if self._saving > self._slow / 2:
            bottleneck, detail = "saving", f"{detail}, while a checkpoint is being written"
        evidence = TimeEvidence(data=False, bottleneck=bottleneck, seconds=row.seconds, usual=usual)
        return self.report(row, detail, evidence)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seconds": self._seconds.state_dict(), "waits": self._waits.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._seconds.load_state_dict(state["seconds"])
        self._waits.load_state_dict(state["waits"])


def _scatter(values: np.ndarray) -> float:
    return _median(np.abs(values - _median(values)))


def _median(values: np.ndarray) -> float:
    """As `np.median`, which takes four times as long for so few values."""
    ordered = np.sort(values)
    return float(ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2

"""Step time, memory and utilisation. They differ between ranks, so nothing here is ever a reason to act."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import numpy as np

from surefoot.judge.baselines import Baseline
from surefoot.judge.detectors.base import Detector
from surefoot.judge.thresholds import BASELINE_ROWS, NOTABLE_FRACTION, WINDOW_ROWS, Thresholds
from surefoot.records import Finding, StepMetrics


class SlowSteps(Detector):
    """Reports steps that take far longer than they did, and whether they wait for data."""

    name: ClassVar = "slow_steps"
    state_names: ClassVar = ("_rows", "_slow", "_waiting", "_reported")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._seconds = Baseline(thresholds.slow_baseline_rows)
        self._waits = Baseline(thresholds.slow_baseline_rows)
        self._rows = 0
        self._slow = 0
        """Slow steps in a row, and how many of them waited for data."""
        self._waiting = 0
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or not row.seconds > 0:
            return []
        self._rows += 1
        if self._rows <= WINDOW_ROWS:  # compilation, caches and the allocator warm up
            return []
        thresholds = self._thresholds
        wait = row.data_wait if row.data_wait > 0 else 0.0
        ready = len(self._seconds) >= thresholds.min_baseline_rows
        usual, usual_wait = self._seconds.median, self._waits.median
        slow = ready and row.seconds > thresholds.slow_step_ratio * usual
        waits = (
            ready
            and wait > thresholds.data_wait_fraction * row.seconds
            and wait > thresholds.slow_step_ratio * max(usual_wait, 1e-3)
        )
        if not slow and not waits:
            self._slow = self._waiting = 0
            self._reported = False
            self._seconds.add(row.attempt, row.seconds)
            self._waits.add(row.attempt, wait)
            return []
        self._slow += 1
        self._waiting += waits
        if self._slow < WINDOW_ROWS or self._reported:
            return []
        self._reported = True
        if self._waiting > self._slow / 2:
            detail = (
                f"steps spend {wait / row.seconds:.0%} of their time waiting for data; it was {usual_wait / usual:.0%}"
            )
            return self.report(row, detail, data=True, wait=wait, usual=usual_wait, seconds=row.seconds)
        detail = f"a step takes {row.seconds:.3g} s, {row.seconds / usual:.3g} times as long as before"
        return self.report(row, detail, data=False, seconds=row.seconds, usual=usual)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seconds": self._seconds.state_dict(), "waits": self._waits.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._seconds.load_state_dict(state["seconds"])
        self._waits.load_state_dict(state["waits"])


class MemoryGrowth(Detector):
    """Reports memory that grows from reading to reading and is hardly ever given back."""

    name: ClassVar = "memory_growth"
    state_names: ClassVar = ("_readings", "_last", "_reported")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._readings: list[float] = []
        self._last = math.nan
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.step < BASELINE_ROWS or not row.memory > 0 or row.memory == self._last:
            return []
        self._last = row.memory
        self._readings = [*self._readings, row.memory][-4 * WINDOW_ROWS :]
        if self._reported or len(self._readings) < WINDOW_ROWS:
            return []
        tail = self._readings[-WINDOW_ROWS:]
        changes = [b - a for a, b in itertools.pairwise(tail)]
        rises = sum(change > 0 for change in changes)
        risen = sum(change for change in changes if change > 0)
        fallen = -sum(change for change in changes if change < 0)
        growth = tail[-1] / self._readings[0]
        given_back = fallen > NOTABLE_FRACTION * risen  # as a garbage collector does
        if rises < WINDOW_ROWS - 2 or given_back or growth < self._thresholds.memory_growth_ratio:
            return []
        self._reported = True
        detail = f"memory has grown steadily from {self._readings[0] / 1e6:.4g} to {tail[-1] / 1e6:.4g} MB"
        return self.report(row, detail, memory=row.memory, grown=growth)


class IdleDevice(Detector):
    """Reports a device whose utilisation stays low, and whether it waits for data or for kernel launches."""

    name: ClassVar = "idle_device"
    state_names: ClassVar = ("_low", "_since", "_wait", "_reported")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._low = 0
        """Readings with low utilisation in a row, and the time of the first."""
        self._since: float | None = None
        self._wait = 0.0
        """Mean fraction of a step spent waiting for data since then."""
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if math.isnan(row.utilisation):
            return []
        if row.utilisation >= self._thresholds.idle_utilisation:
            self._low, self._since, self._wait, self._reported = 0, None, 0.0, False
            return []
        self._since = row.time if self._since is None else self._since
        self._low += 1
        fraction = row.data_wait / row.seconds if row.seconds > 0 and not math.isnan(row.data_wait) else 0.0
        self._wait += (fraction - self._wait) / self._low
        seconds = row.time - self._since
        if seconds < self._thresholds.idle_seconds or self._reported:
            return []
        self._reported = True
        data = self._wait > self._thresholds.data_wait_fraction
        reason = (
            f"steps spend {self._wait:.0%} of their time waiting for data; add loader workers or prefetching"
            if data
            else "it waits for kernel launches; use a larger batch or torch.compile"
        )
        limit = self._thresholds.idle_utilisation
        detail = f"the device has been below {limit:.0%} utilisation for {seconds:.0f} s: {reason}"
        return self.report(row, detail, data=data, utilisation=row.utilisation, data_wait_share=self._wait)

"""Whether a run has begun to learn, or has been broken since its first update."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from typing import Any

from surefoot.judge.detectors.base import finding_at
from surefoot.judge.evidence import EarlyEvidence
from surefoot.judge.thresholds import (
    CLEAR_RATIO,
    DOUBLE_RATIO,
    EARLY_UPDATES,
    HUGE_RATIO,
    NEGLIGIBLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
    SETTLED_UPDATES,
    STRONG_RATIO,
    WINDOW_ROWS,
)
from surefoot.records import REFUSED, Finding, FindingKind, StepMetrics

LEVEL_ROWS = WINDOW_ROWS // 2
"""Losses whose median is the level of the loss in the first updates."""


class EarlyLearning:
    """Watches the loss until it is proven that the run learns: it must fall, stay down, and not explode.

    A run that is wrong from its first update has no past to be compared with, so its loss is compared with the first
    one, and with the best level it has reached.
    """

    def __init__(self) -> None:
        self.proven = False
        """The run has learnt something, or it has gone on so long that its first state is of no use any more."""
        self.restarts = 0
        """Restarts of the run so far."""
        self._updates = 0
        """Updates since the first one, or since the last restart."""
        self.start_loss = math.nan
        """The very first loss; the next ones may have changed already."""
        self._losses: deque[float] = deque(maxlen=WINDOW_ROWS)
        self._failed: deque[bool] = deque(maxlen=LEVEL_ROWS)
        """Of the last rows: whether the update was refused."""
        self._best = math.inf
        """The lowest level so far."""
        self._highest = -math.inf
        """The highest loss among the first updates."""
        self._norms = (math.inf, 0.0)
        """The smallest and the largest gradient norm."""
        self._silent_until = LEVEL_ROWS
        """Updates to be made before trouble is reported (again)."""

    def update(self, row: StepMetrics) -> Finding | None:
        """Add a row; returns what is wrong with the start of this run, if anything is."""
        trouble = self._update(row)
        if not trouble:
            return None
        evidence = EarlyEvidence(start=self.start_loss, best=self._best, violent=self._violent_start)
        return finding_at(row, FindingKind.EARLY_LEARNING, trouble, evidence.as_dict())

    def _update(self, row: StepMetrics) -> str:
        self._failed.append(row.verdict in REFUSED)
        if row.applied:
            self._updates += 1
        if row.applied and math.isfinite(row.loss):
            self._add(row)
        elif not row.applied and sum(self._failed) < REPEAT_COUNT:
            return ""
        if self._updates + len(self._failed) < self._silent_until:
            return ""
        trouble = self._trouble()
        if trouble:
            self._silent_until = self._updates + len(self._failed) + WINDOW_ROWS
        elif self._updates >= EARLY_UPDATES:
            self.proven = self._has_learnt() or self._updates >= SETTLED_UPDATES
        return trouble

    def _add(self, row: StepMetrics) -> None:
        if math.isnan(self.start_loss):
            self.start_loss = row.loss
        self._losses.append(row.loss)
        if len(self._losses) >= LEVEL_ROWS:
            self._best = min(self._best, self._level)
        if self._updates <= EARLY_UPDATES // 2:
            self._highest = max(self._highest, row.loss)
        if row.norm > 0:
            self._norms = min(self._norms[0], row.norm), max(self._norms[1], row.norm)

    def dismissed(self) -> None:
        """What was reported calls for nothing: look again when the run has doubled its length."""
        self._silent_until = 2 * max(self._updates, WINDOW_ROWS)

    def restarted(self) -> None:
        """The run began anew from its first state."""
        self.restarts += 1
        self._forget()

    def rewound(self) -> None:
        """The run was rewound: the last losses say nothing about the next ones."""
        self._losses.clear()
        self._failed.clear()

    def _forget(self) -> None:
        self._updates, self._silent_until = 0, LEVEL_ROWS
        self._losses.clear()
        self._failed.clear()
        self._best, self._highest, self._norms = math.inf, -math.inf, (math.inf, 0.0)

    # -- what is wrong

    @property
    def _level(self) -> float:
        return statistics.median(list(self._losses)[-LEVEL_ROWS:])

    @property
    def _noise(self) -> float:
        """About one standard deviation of the loss from batch to batch."""
        losses = list(self._losses)
        steps = [abs(b - a) for a, b in itertools.pairwise(losses)]
        return statistics.median(steps) if steps else math.inf

    def _trouble(self) -> str:
        if sum(self._failed) >= REPEAT_COUNT:
            return f"{sum(self._failed)} of the first updates were refused, the loss began at {self.start_loss:.4g}"
        start = self.start_loss
        if len(self._losses) < LEVEL_ROWS or not start > 0:
            return ""
        last = list(self._losses)[-RECENT_ROWS:]
        if self._level > CLEAR_RATIO * start and min(last) > start:
            return f"the loss began at {start:.4g} and has exploded to {self._level:.4g}"
        learnt = start - self._best
        halfway = self._best + learnt / 2
        lost = self._level - self._best > STRONG_RATIO * self._noise / math.sqrt(LEVEL_ROWS)
        if learnt > self._negligible and min(last) > halfway and lost:
            return f"the loss fell from {start:.4g} to {self._best:.4g} and is back at {self._level:.4g}"
        if self._updates >= EARLY_UPDATES and not self._has_learnt() and self._violent_start:
            return f"the loss began at {start:.4g} and has not fallen in {self._updates} updates"
        return ""

    @property
    def _negligible(self) -> float:
        """A fall of the loss that is no proof of learning."""
        return max(NEGLIGIBLE_FRACTION * abs(self.start_loss), self._noise / DOUBLE_RATIO)

    def _has_learnt(self) -> bool:
        """The loss is lower than at first by more than chance."""
        return len(self._losses) >= LEVEL_ROWS and self.start_loss - self._level > self._negligible

    @property
    def _violent_start(self) -> bool:
        """Loss or gradients changed far more in the first updates than learning does: a run that merely waits on a
        plateau is left alone."""
        smallest, largest = self._norms
        return self._highest > CLEAR_RATIO * self.start_loss or largest > HUGE_RATIO * smallest

    # -- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "proven": self.proven,
            "restarts": self.restarts,
            "updates": self._updates,
            "start_loss": self.start_loss,
            "losses": list(self._losses),
            "failed": list(self._failed),
            "best": self._best,
            "highest": self._highest,
            "norms": list(self._norms),
            "silent_until": self._silent_until,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.proven, self.restarts, self._updates = state["proven"], state["restarts"], state["updates"]
        self.start_loss = state["start_loss"]
        self._losses = deque(state["losses"], maxlen=WINDOW_ROWS)
        self._failed = deque(state["failed"], maxlen=LEVEL_ROWS)
        self._best, self._highest = state["best"], state["highest"]
        smallest, largest = state["norms"]
        self._norms, self._silent_until = (smallest, largest), state["silent_until"]

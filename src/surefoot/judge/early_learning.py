"""Whether a run has begun to learn, or has been broken since its first update."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

from surefoot.judge.detectors.base import finding_at
from surefoot.judge.evidence import EarlyEvidence
from surefoot.judge.thresholds import (
    BASELINE_ROWS,
    CLEAR_RATIO,
    DOUBLE_RATIO,
    EARLY_UPDATES,
    HUGE_RATIO,
    NEGLIGIBLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
    SETTLED_UPDATES,
    SMALL_FRACTION,
    STRONG_RATIO,
    WINDOW_ROWS,
)
from surefoot.records import REFUSED, Finding, FindingKind, StepMetrics

LEVEL_ROWS = WINDOW_ROWS // 2
"""Losses whose median is the level of the loss in the first updates."""
LEVEL_SIGMAS = STRONG_RATIO
"""Standard deviations of a single loss that a level lies above another for certain, though many are looked at."""
HIGHEST_SIGMAS = CLEAR_RATIO * STRONG_RATIO
"""The same for the highest of many losses above a single one."""
TINY = sys.float_info.min
"""In place of losses and norms that have no logarithm."""


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
        self._losses: deque[float] = deque(maxlen=BASELINE_ROWS)
        self._failed: deque[bool] = deque(maxlen=LEVEL_ROWS)
        """Of the last rows: whether the update was refused."""
        self._best = math.inf
        """The lowest level so far."""
        self._highest = -math.inf
        """The highest loss among the first updates."""
        self._norms: deque[float] = deque(maxlen=BASELINE_ROWS)
        """The last gradient norms."""
        self._first_norm = 0.0
        self._highest_norm = 0.0
        """The largest gradient norm among the first updates."""
        self._silent_until = LEVEL_ROWS
        """Updates to be made before trouble is reported (again)."""
        self._first_eval = self._last_eval = math.nan

    @property
    def doubtful(self) -> bool:
        """Nothing is learnt for certain yet, and no trial has looked into it lately."""
        return not self.proven and (self._silent_until <= LEVEL_ROWS or self._updates >= self._silent_until)

    def update(self, row: StepMetrics) -> Finding | None:
        """Add a row; returns what is wrong with the start of this run, if anything is."""
        trouble = self._update(row)
        if not trouble:
            return None
        evidence = EarlyEvidence(start=self.start_loss, best=self._best, violent=self._violent_start)
        return finding_at(row, FindingKind.EARLY_LEARNING, trouble, evidence.as_dict())

    def _update(self, row: StepMetrics) -> str:
        self._failed.append(row.verdict in REFUSED)
        if math.isfinite(row.eval_loss):
            self._first_eval = row.eval_loss if math.isnan(self._first_eval) else self._first_eval
            self._last_eval = row.eval_loss
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
            self.dismissed()
        elif self._updates >= EARLY_UPDATES:
            self.proven = self._has_learnt() or self._updates >= SETTLED_UPDATES
        return trouble

    def _add(self, row: StepMetrics) -> None:
        if math.isnan(self.start_loss):
            self.start_loss = row.loss
        self._losses.append(row.loss)
        if len(self._losses) >= LEVEL_ROWS:
            self._best = min(self._best, self._level)
        first = self._updates <= EARLY_UPDATES // 2
        if first:
            self._highest = max(self._highest, row.loss)
        if row.norm > 0:
            self._norms.append(row.norm)
            self._first_norm = self._first_norm or row.norm
            self._highest_norm = max(self._highest_norm, row.norm) if first else self._highest_norm

    def dismissed(self) -> None:
        """What was reported calls for nothing so far: look again when the run has doubled its length."""
        self._silent_until = 2 * max(self._updates, WINDOW_ROWS)

    def restarted(self) -> None:
        """The run began anew from its first state."""
        self.restarts += 1
        self._forget()

    def rewound(self) -> None:
        """The run was rewound: the last losses say nothing about the next ones."""
        for rows in (self._losses, self._failed, self._norms):
            rows.clear()

    def _forget(self) -> None:
        self._updates, self._silent_until = 0, LEVEL_ROWS
        self.rewound()
        self._best, self._highest = math.inf, -math.inf
        self._first_norm = self._highest_norm = 0.0
        self._first_eval = self._last_eval = math.nan

    # -- what is wrong

    @property
    def _level(self) -> float:
        return statistics.median(list(self._losses)[-LEVEL_ROWS:])

    def _trouble(self) -> str:
        if sum(self._failed) >= REPEAT_COUNT:
            return f"{sum(self._failed)} of the first updates were refused, the loss began at {self.start_loss:.4g}"
        start, best = self.start_loss, self._best
        if len(self._losses) < LEVEL_ROWS or not start > 0:
            return ""
        level, lowest, noise = self._level, min(list(self._losses)[-RECENT_ROWS:]), LEVEL_SIGMAS * _noise(self._losses)
        if lowest > start and _rise(start, level) > max(math.log(CLEAR_RATIO), noise):
            return f"the loss began at {start:.4g} and has exploded to {level:.4g}"
        fell = _rise(best, start) > max(NEGLIGIBLE_FRACTION, noise)
        if fell and lowest > (start + best) / 2 and _rise(best, level) > noise:
            return f"the loss fell from {start:.4g} to {best:.4g} and is back at {level:.4g}"
        if self._updates >= EARLY_UPDATES and not self._has_learnt() and self._violent_start:
            return f"the loss began at {start:.4g} and has not fallen in {self._updates} updates"
        return ""

    def _has_learnt(self) -> bool:
        """The loss is lower than at first by more than chance, or the eval loss is, whatever single batches cost."""
        if self._last_eval < (1 - SMALL_FRACTION) * min(self._first_eval, self.start_loss):
            return True
        if len(self._losses) < LEVEL_ROWS:
            return False
        if not self.start_loss > 0:
            return self.start_loss - self._level > NEGLIGIBLE_FRACTION * abs(self.start_loss)
        return _rise(self._level, self.start_loss) > max(NEGLIGIBLE_FRACTION, DOUBLE_RATIO * _noise(self._losses))

    @property
    def _violent_start(self) -> bool:
        """Loss or gradients changed far more in the first updates than learning and the choice of batches explain: a
        run that merely waits on a plateau is left alone."""
        leap = max(math.log(CLEAR_RATIO), HIGHEST_SIGMAS * _noise(self._losses))
        if _rise(self.start_loss, self._highest) > leap:
            return True
        if not self._norms:
            return False
        usual = statistics.median(list(self._norms)[-WINDOW_ROWS:])
        changed = max(math.log(HUGE_RATIO), HIGHEST_SIGMAS * _noise(self._norms))
        return max(_rise(usual, self._highest_norm), _rise(self._first_norm, usual)) > changed

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
            "first_norm": self._first_norm,
            "highest_norm": self._highest_norm,
            "silent_until": self._silent_until,
            "evals": [self._first_eval, self._last_eval],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.proven, self.restarts, self._updates = state["proven"], state["restarts"], state["updates"]
        self.start_loss = state["start_loss"]
        self._losses = deque(state["losses"], maxlen=BASELINE_ROWS)
        self._failed = deque(state["failed"], maxlen=LEVEL_ROWS)
        self._best, self._highest = state["best"], state["highest"]
        self._norms = deque(state["norms"], maxlen=BASELINE_ROWS)
        self._first_norm, self._highest_norm = state["first_norm"], state["highest_norm"]
        self._silent_until = state["silent_until"]
        self._first_eval, self._last_eval = state.get("evals", (math.nan, math.nan))


def _rise(before: float, after: float) -> float:
    """The logarithm of the factor by which a value has grown; in it, losses and norms scatter evenly."""
    return math.log(max(after, TINY) / max(before, TINY))


def _noise(values: Iterable[float]) -> float:
    """About one standard deviation of `_rise` from one batch to another."""
    steps = [abs(_rise(a, b)) for a, b in itertools.pairwise(values)]
    return statistics.median(steps) if steps else math.inf

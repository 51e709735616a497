"""The weights themselves: written to by something else than the optimizer, not moving, or different between ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import NONFINITE
from surefoot.judge.detectors.base import NOTHING, Detector, Findings, WatchingDetector
from surefoot.judge.evidence import ReplicasEvidence, RoundedUpdates, SmallUpdates, StillTensors, WeightJumpEvidence
from surefoot.judge.signals import Sign, Signals
from surefoot.judge.thresholds import (
    CLEAR_RATIO,
    FROZEN_RATIO,
    NOTABLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
    STRONG_RATIO,
    WINDOW_ROWS,
)
from surefoot.records import FindingKind, Severity, StepMetrics


class WeightJump(Detector):
    """Reports a weight norm that changed between two checks by more than updates as large as those seen could do."""

    kind: ClassVar = FindingKind.WEIGHT_JUMP
    wakes_on: ClassVar = Sign.WEIGHTS
    state_names: ClassVar = ("_attempts", "_norms", "_update_ratios")

    def __init__(self) -> None:
        self._attempts: list[int] = []
        """Attempts of the last weight checks, with the norms found."""
        self._norms: list[float] = []
        self._update_ratios: list[float] = []

    def rewound(self) -> None:
        """Norms of the abandoned states say nothing about the restored one."""
        self._attempts, self._norms = [], []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if not 0 < row.weight_norm < math.inf:
            return NOTHING
        if row.update_ratio > 0:
            self._update_ratios = [*self._update_ratios, row.update_ratio][-RECENT_ROWS:]
        findings = self._compare(row) if len(self._norms) > 1 and row.attempt > WINDOW_ROWS // 2 else NOTHING
        self._attempts = [*self._attempts, row.attempt][-RECENT_ROWS:]
        self._norms = [*self._norms, row.weight_norm][-RECENT_ROWS:]
        return findings

    def _compare(self, row: StepMetrics) -> Findings:
        ratio = row.weight_norm / self._norms[-1]
        usual_change = max(abs(math.log(b / a)) for a, b in itertools.pairwise(self._norms))
        by_updates = (row.attempt - self._attempts[-1]) * max(self._update_ratios, default=0.0)
        change = abs(math.log(ratio))
        # A change of up to 4 times the usual one between two checks is ordinary training.
        if change <= max(math.log(CLEAR_RATIO), STRONG_RATIO * usual_change, by_updates):
            return NOTHING
        detail = f"the norm of the weights is {ratio:.3g} times what it was, which no update explains"
        # Beyond a factor of 4 next to nothing can be left of what was learnt: no need to wait for the loss.
        severe = change > math.log(STRONG_RATIO)
        return self.report(row, detail, WeightJumpEvidence(times=ratio, well=self._attempts[-1]), severe=severe)


class FrozenWeights(WatchingDetector):
    """Reports weights that do not move: held by no optimizer, without gradients, or with updates close to zero."""

    kind: ClassVar = FindingKind.FROZEN_WEIGHTS
    wakes_on: ClassVar = Sign.WEIGHTS | Sign.UNCHANGED | Sign.MISSING_LAYER
    state_names: ClassVar = (
        "_unowned_reported",
        "_rows_missing",
        "_missing_reported",
        "_usual_size",
        "_checks",
        "_small_checks",
        "_small_reported",
        "_unchanged",
        "_had_all_grads",
        "_had_grad",
    )

    def __init__(self, names: Sequence[str], owned: int | None, signals: Signals, *, adaptive: bool) -> None:
        super().__init__()
        self._names = names
        self._owned = len(names) if owned is None else owned
        """The first so many tensors are held by an optimizer."""
        self._signals = signals
        self._adaptive = adaptive
        """The size of updates does not depend on that of the gradients."""
        self._unowned_reported = False
        self._had_grad = np.zeros(0, dtype=bool)
        """Which tensors have had gradients."""
        self._had_all_grads = False
        """All of them have: then a complete row needs no closer look."""
        self._rows_missing = 0
        self._missing_reported = False
        self._usual_size = math.nan
        """Log of the usual update at a learning rate of one."""
        self._checks = 0
        """Weight checks that formed it, up to 3."""
        self._small_checks = 0
        self._small_reported = False
        self._unchanged: list[float] = []
        """The fraction of weights that each of the last steps left unchanged."""

    def rewound(self) -> None:
        """Measure updates anew: those before the rewind may have been the trouble itself."""
        self._usual_size, self._checks, self._small_checks, self._small_reported = math.nan, 0, 0, False
        self._unchanged = []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        findings = [
            *self._unowned(row),
            *self._missing_grads(row, layers),
            *self._small_updates(row),
            *self._rounded_updates(row),
        ]
        self.watching = not self._had_all_grads or self._rows_missing > 0
        return findings

    def _unowned(self, row: StepMetrics) -> Findings:
        if self._unowned_reported or self._owned >= len(self._names):
            return NOTHING
        self._unowned_reported = True
        names = list(self._names)[self._owned :]
        detail = f"{len(names)} trainable tensors are in no optimizer and will never change: {', '.join(names[:5])}"
        return self.report(row, detail, StillTensors(layers=names[:5], tensors=len(names), of=len(self._names)))

    def _missing_grads(self, row: StepMetrics, layers: np.ndarray | None) -> Findings:
        """Tensors that had gradients and no longer get any."""
        if layers is None or row.optimizer or not row.applied:
            return NOTHING
        if self._signals.layers.all_present and self._had_all_grads:
            self._rows_missing, self._missing_reported = 0, False
            return NOTHING
        present = layers[: self._owned, NONFINITE] >= 0
        if len(present) != len(self._had_grad):
            self._had_grad = present
        missing = self._had_grad & ~present
        if not missing.any():
            self._rows_missing, self._missing_reported = 0, False
            self._had_grad = self._had_grad | present
            self._had_all_grads = len(self._had_grad) == self._owned and bool(self._had_grad.all())
            return NOTHING
        self._rows_missing += 1
        if self._rows_missing < RECENT_ROWS or self._missing_reported:
            return NOTHING
        self._missing_reported = True
        count = int(missing.sum())
        names = [str(self._names[i]) for i in np.flatnonzero(missing).tolist()[:5] if i < len(self._names)]
        detail = f"{count} tensors no longer get a gradient: {', '.join(names)}"
        return self.report(row, detail, StillTensors(layers=names, tensors=count, of=len(present)))

    def _small_updates(self, row: StepMetrics) -> Findings:
        """Updates that have become far smaller than the learning rate explains."""
        lr = self._signals.lr
        if not row.update_ratio > 0 or not lr > 0:
            return NOTHING
        norms = self._signals.log_norms.get(row.optimizer)
        if not self._adaptive and norms is None:
            return NOTHING
        size = math.log(row.update_ratio / lr) - (0.0 if self._adaptive or norms is None else norms.median)
        if self._checks < REPEAT_COUNT:
            self._checks += 1
            self._usual_size = size if math.isnan(self._usual_size) else min(self._usual_size, size)
            return NOTHING
        if size > self._usual_size - math.log(FROZEN_RATIO):
            self._small_checks, self._small_reported = 0, False
            self._usual_size += (size - self._usual_size) / (8 if size > self._usual_size else 64)
            return NOTHING
        self._small_checks += 1
        # A check samples few of the weights, so that a single one says little.
        if self._small_checks < REPEAT_COUNT or self._small_reported or self._mostly_dead:
            return NOTHING
        self._small_reported = True
        ratio = math.exp(self._usual_size - size)
        detail = f"the weights hardly move: updates are {ratio:.3g} times smaller than before"
        return self.report(row, detail, SmallUpdates(update_ratio=row.update_ratio, smaller=ratio))

    @property
    def _mostly_dead(self) -> bool:
        """Most gradients have become zero: that explains why nothing moves, and `DeadUnits` reports it."""
        zeros = self._signals.layers.zeros_change
        return bool(zeros.size) and float(np.median(zeros)) > NOTABLE_FRACTION

    def _rounded_updates(self, row: StepMetrics) -> Findings:
        """Weights that a whole step leaves exactly as they were, though lr and gradients are not zero."""
        if self._signals.applied_attempt != row.attempt - 1:  # it is about a refused step, which moves nothing
            return NOTHING
        if math.isnan(row.unchanged_fraction) or not row.applied or not row.lr > 0 or not row.norm > 0:
            return NOTHING
        earlier, self._unchanged = self._unchanged, [*self._unchanged, row.unchanged_fraction][-REPEAT_COUNT - 1 :]
        if len(earlier) <= REPEAT_COUNT:
            return NOTHING
        bound = min(earlier[:-1]) + 2 * NOTABLE_FRACTION
        if not min(earlier[-1], row.unchanged_fraction) > bound or self._mostly_dead:
            return NOTHING
        self._unchanged = []  # from here on this is normal
        detail = f"{row.unchanged_fraction:.0%} of the weights did not change in a step: updates are rounded away"
        return self.report(row, detail, RoundedUpdates(unchanged_fraction=row.unchanged_fraction))


_CHECK_RANK = "Check that rank's device and memory (ECC and Xid errors), and code that runs on one rank only."
_USE_DDP = "If all ranks should hold the same weights, use DistributedDataParallel or broadcast them from rank 0."


class Replicas(WatchingDetector):
    """Reports ranks whose weight checksums differ after they were equal several times in a row.

    Weights that the loop itself does not keep equal (separate models, local SGD) are reported once and never acted on.
    """

    kind: ClassVar = FindingKind.REPLICAS
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = Sign.REPLICAS
    state_names: ClassVar = ("_equal", "_equal_attempt", "_different", "_rewind_wanted", "_restored", "_disabled")

    def __init__(self) -> None:
        super().__init__()
        self._equal = 0
        """Comparisons that found all ranks equal."""
        self._equal_attempt = -1
        """The attempt of the last of them; it saw the weights before that attempt's update."""
        self._different = 0
        """Comparisons since then that found a difference."""
        self._rewind_wanted = False
        """A difference was reported that calls for an action."""
        self._restored = False
        """The ranks were rewound to equal weights, and not compared since."""
        self._disabled = False
        """Nothing more is reported: the ranks are not meant to be equal, or cannot be made so."""
        self._cannot_restore = ""
        """Why the ranks cannot be made equal, until that is reported."""

    def rewound_to(self, attempt: int) -> None:
        """The run was rewound to this attempt: to equal weights, if the ranks were equal after it."""
        self._restored = self._rewind_wanted and attempt < self._equal_attempt
        self._rewind_wanted = False

    def restore_failed(self, reason: str) -> None:
        """The ranks cannot be made equal."""
        self._cannot_restore, self._disabled, self.watching = reason, True, True

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        self.watching = False
        if self._cannot_restore:
            return self._report_failure(row)
        if self._disabled or math.isnan(row.replicas):
            return NOTHING
        return self._found_different(row) if row.replicas > 0 else self._found_equal(row)

    def _found_equal(self, row: StepMetrics) -> Findings:
        restored, self._restored = self._restored, False
        self._equal, self._equal_attempt, self._different, self._rewind_wanted = self._equal + 1, row.attempt, 0, False
        if not restored:
            return NOTHING
        return self.report(row, "all ranks hold the same weights again, by checksum", {"equal": True})

    def _found_different(self, row: StepMetrics) -> Findings:
        self._different += 1
        who = f"rank {row.rank} holds" if row.rank >= 0 and row.replicas == 1 else f"{row.replicas:.0f} ranks hold"
        who = "the ranks hold" if row.rank < 0 else who
        if self._equal < REPEAT_COUNT:
            self._disabled = True
            return self._report_ranks(row, f"{who} different weights from the start: taken as intended. {_USE_DDP}")
        if math.isinf(row.replicas):
            self._disabled = True
            detail = "different weights because each applies its own gradients: taken as intended"
            return self._report_ranks(row, f"{who} {detail}. {_USE_DDP}")
        if self._restored:
            self._disabled = True
            detail = f"{who} different weights again right after they were made equal: left alone. {_CHECK_RANK}"
            return self._report_ranks(row, detail)
        if self._different & (self._different - 1):  # report only the 1st, 2nd, 4th, 8th ... in a row
            return NOTHING
        self._rewind_wanted = True
        what = "weights that the other ranks do not" if row.rank >= 0 else "different weights"
        detail = f"{who} {what}, by checksum; at attempt {self._equal_attempt} all were equal"
        return self._report_ranks(row, detail, severe=True)

    def _report_failure(self, row: StepMetrics) -> Findings:
        reason, self._cannot_restore = self._cannot_restore, ""
        detail = (
            f"the ranks hold different weights and cannot be made equal here: {reason}. Stop the run and start all "
            f"ranks again from a checkpoint saved before attempt {self._equal_attempt}. {_CHECK_RANK}"
        )
        return self._report_ranks(row, detail)

    def _report_ranks(self, row: StepMetrics, detail: str, *, severe: bool = False) -> Findings:
        evidence = ReplicasEvidence(ranks=row.replicas, culprit_rank=row.rank, well=self._equal_attempt, equal=False)
        return self.report(row, detail, evidence, severe=severe)

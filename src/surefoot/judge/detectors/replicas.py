"""Ranks that should hold the same weights and do not."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import AGAIN
from surefoot.records import Finding, StepMetrics

CHECK = "Check that rank's device and memory (ECC and Xid errors), and code that runs on one rank only."
_EQUALISE = "If all ranks should hold the same weights, use DistributedDataParallel or broadcast them from rank 0."


class Replicas(Detector):
    """Speaks when the checksums of the ranks' weights differ after they were equal several times in a row.

    Weights that are not kept equal by the loop itself (own models, local SGD) are told once and never acted on.
    """

    name: ClassVar = "replicas"
    kept: ClassVar = ("_equal", "_well", "_differs", "_asked", "_restored", "_off")

    def __init__(self) -> None:
        self._equal = 0
        """Comparisons that found all ranks equal."""
        self._well = -1
        """The attempt of the last of them; it tells of the weights before that attempt's update."""
        self._differs = 0
        """Comparisons since then that found a difference."""
        self._asked = False
        """A difference was told that calls for an action."""
        self._restored = False
        """The ranks have gone back to equal weights, and were not compared since."""
        self._off = False
        """Nothing is said any more: the ranks are not meant to be equal, or cannot be made so."""
        self._why = ""
        """Why the ranks cannot be made equal, until that is told."""

    def went_back(self, attempt: int) -> None:
        """The run is again as it was after this attempt: with equal weights, if the ranks were equal after it."""
        self._restored = self._asked and attempt < self._well
        self._asked = False

    def cannot_restore(self, why: str) -> None:
        """What was asked for cannot be done."""
        self._why, self._off = why, True

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if self._why:
            return self._stuck(row)
        if self._off or math.isnan(row.replicas):
            return []
        return self._differ(row) if row.replicas > 0 else self._are_equal(row)

    def _are_equal(self, row: StepMetrics) -> list[Finding]:
        again, self._restored = self._restored, False
        self._equal, self._well, self._differs, self._asked = self._equal + 1, row.attempt, 0, False
        return self.found(row, "all ranks hold the same weights again, by checksum", equal=True) if again else []

    def _differ(self, row: StepMetrics) -> list[Finding]:
        self._differs += 1
        who = f"rank {row.rank} holds" if row.rank >= 0 and row.replicas == 1 else f"{row.replicas:.0f} ranks hold"
        who = "the ranks hold" if row.rank < 0 else who
        if self._equal < AGAIN:
            self._off = True
            return self._tell(row, f"{who} different weights from the start: taken as intended. {_EQUALISE}")
        if math.isinf(row.replicas):
            self._off = True
            told = "different weights, for each applies gradients of its own: taken as intended"
            return self._tell(row, f"{who} {told}. {_EQUALISE}")
        if self._restored:
            self._off = True
            return self._tell(
                row, f"{who} different weights again right after they were made equal: left alone. {CHECK}"
            )
        if self._differs & (self._differs - 1):  # of many in a row the first, second, fourth and so on are told
            return []
        self._asked = True
        other = "weights that the other ranks do not" if row.rank >= 0 else "different weights"
        detail = f"{who} {other}, by checksum; at attempt {self._well} all were equal"
        return self._tell(row, detail, severe=True)

    def _stuck(self, row: StepMetrics) -> list[Finding]:
        why, self._why = self._why, ""
        detail = (
            f"the ranks hold different weights and cannot be made equal here: {why}. Stop the run, and start all ranks "
            f"again from a checkpoint saved before attempt {self._well}. {CHECK}"
        )
        return self._tell(row, detail)

    def _tell(self, row: StepMetrics, detail: str, *, severe: bool = False) -> list[Finding]:
        told = {"ranks": row.replicas, "culprit_rank": row.rank, "well": self._well, "equal": False}
        return self.found(row, detail, severe=severe, **told)

"""Updates that the gate refused: non-finite ones, and finite ones far outside what the run has accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from surefoot.judge.detectors.base import NOTHING, Detector, Findings
from surefoot.judge.signals import Sign, Signals
from surefoot.records import FindingKind, Pattern, StepMetrics, Verdict


class NonFinite(Detector):
    """Reports every non-finite loss, gradient, weight or buffer, but not the overflows that loss scaling expects."""

    kind: ClassVar = FindingKind.NONFINITE
    wakes_on: ClassVar = Sign.REFUSED | Sign.WEIGHTS

    def __init__(self, buffers: Sequence[str] = ()) -> None:
        self._buffers = buffers
        """Names of the buffers that are checked."""

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        parts: list[str] = []
        if row.verdict is Verdict.NONFINITE:
            if not math.isfinite(row.loss):
                parts.append(f"the loss is {row.loss}")
            if row.nonfinite > 0:
                parts.append(f"{row.nonfinite:.0f} gradient values are not finite")
            elif not math.isfinite(row.norm):
                parts.append("the gradients are finite, but their norm overflows float32")
            if row.nonfinite_buffers > 0:
                parts.append(self._describe_buffers(row))
        if row.nonfinite_params > 0:
            parts.append(f"{row.nonfinite_params:.0f} values in weights or buffers are not finite")
        if not parts:
            return NOTHING
        evidence: dict[str, Any] = {"loss": row.loss, "norm": row.norm, "nonfinite": row.nonfinite}
        return self.report(row, ", ".join(parts), evidence | origin_evidence(row), Pattern.NONFINITE)

    def _describe_buffers(self, row: StepMetrics) -> str:
        known = 0 <= row.first_nonfinite_buffer < len(self._buffers)
        first = f"buffer {self._buffers[row.first_nonfinite_buffer]}" if known else "a buffer of the model"
        more = f" and {row.nonfinite_buffers - 1:.0f} more" if row.nonfinite_buffers > 1 else ""
        return f"the batch made {first}{more} non-finite"


class NormOutlier(Detector):
    """Reports every finite update that the gate refused, and names the limit it exceeded."""

    kind: ClassVar = FindingKind.NORM_OUTLIER
    wakes_on: ClassVar = Sign.REFUSED

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if row.verdict is not Verdict.NORM_OUTLIER:
            return NOTHING
        detail, limit_evidence = self._exceeded_limit(row)
        evidence: dict[str, Any] = {"loss": row.loss, "norm": row.norm, "limit": row.norm_limit}
        return self.report(row, detail, evidence | limit_evidence | origin_evidence(row), Pattern.JUMP)

    def _exceeded_limit(self, row: StepMetrics) -> tuple[str, dict[str, float]]:
        """The limit that the update exceeded, in words and as evidence."""
        if row.norm > row.norm_limit:
            ratio = row.norm / row.norm_limit
            return f"gradient norm {row.norm:.4g}, {ratio:.3g} times the limit of {row.norm_limit:.4g}", {}
        ceiling = self._signals.overrides.loss_ceiling
        if row.loss > ceiling:
            detail = f"loss {row.loss:.4g}, above the ceiling of {ceiling:.4g} set after an earlier incident"
            return detail, {"ceiling": ceiling}
        return "refused together with the update of another optimizer from the same backward", {}


def origin_evidence(row: StepMetrics) -> dict[str, int]:
    """The micro-batch and the rank that caused it, where they are known."""
    known = {"bad_microbatch": row.bad_microbatch} if row.bad_microbatch >= 0 and row.num_microbatches > 1 else {}
    return known | ({"culprit_rank": row.rank} if row.rank >= 0 else {})

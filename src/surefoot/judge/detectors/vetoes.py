"""Updates that the gate refused: non-finite ones, and finite ones far outside what the run has accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surefoot.judge.baselines import Baselines
from surefoot.records import Finding, Pattern, StepMetrics, Verdict


class NonFinite:
    """Reports every non-finite loss, gradient, weight or buffer, but not the overflows that loss scaling expects."""

    def __init__(self, buffers: Sequence[str] = ()) -> None:
        self._buffers = buffers
        """Names of the buffers that are checked."""

    def update(self, row: StepMetrics) -> list[Finding]:
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
            return []
        evidence: dict[str, Any] = {"loss": row.loss, "norm": row.norm, "nonfinite": row.nonfinite}
        return [
            Finding(
                step=row.step,
                attempt=row.attempt,
                time=row.time,
                detector="nonfinite",
                pattern=Pattern.NONFINITE,
                detail=", ".join(parts),
                evidence=evidence | origin_evidence(row),
            )
        ]

    def _describe_buffers(self, row: StepMetrics) -> str:
        known = 0 <= row.first_nonfinite_buffer < len(self._buffers)
        first = f"buffer {self._buffers[row.first_nonfinite_buffer]}" if known else "a buffer of the model"
        more = f" and {row.nonfinite_buffers - 1:.0f} more" if row.nonfinite_buffers > 1 else ""
        return f"the batch made {first}{more} non-finite"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class NormOutlier:
    """Reports every finite update that the gate refused, and names the limit it exceeded."""

    def __init__(self, baselines: Baselines) -> None:
        self._baselines = baselines

    def update(self, row: StepMetrics) -> list[Finding]:
        if row.verdict is not Verdict.NORM_OUTLIER:
            return []
        detail, limit_evidence = self._exceeded_limit(row)
        evidence: dict[str, Any] = {"loss": row.loss, "norm": row.norm, "limit": row.norm_limit}
        return [
            Finding(
                step=row.step,
                attempt=row.attempt,
                time=row.time,
                detector="norm_outlier",
                pattern=Pattern.JUMP,
                detail=detail,
                evidence=evidence | limit_evidence | origin_evidence(row),
            )
        ]

    def _exceeded_limit(self, row: StepMetrics) -> tuple[str, dict[str, float]]:
        """The limit that the update exceeded, in words and as evidence."""
        if row.norm > row.norm_limit:
            ratio = row.norm / row.norm_limit
            return f"gradient norm {row.norm:.4g}, {ratio:.3g} times the limit of {row.norm_limit:.4g}", {}
        ceiling = self._baselines.overrides.loss_ceiling
        if row.loss > ceiling:
            detail = f"loss {row.loss:.4g}, above the ceiling of {ceiling:.4g} set after an earlier incident"
            return detail, {"ceiling": ceiling}
        return "refused together with the update of another optimizer from the same backward", {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def origin_evidence(row: StepMetrics) -> dict[str, int]:
    """The micro-batch and the rank that caused it, where they are known."""
    known = {"bad_microbatch": row.bad_microbatch} if row.bad_microbatch >= 0 and row.num_microbatches > 1 else {}
    return known | ({"culprit_rank": row.rank} if row.rank >= 0 else {})

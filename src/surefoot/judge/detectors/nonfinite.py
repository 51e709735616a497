"""Anything that is not a number or not finite: tolerance zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surefoot.records import Finding, Pattern, StepMetrics, Verdict


class NonFinite:
    """Speaks at every non-finite loss, gradient or weight, and not at the overflows that loss scaling expects."""

    def __init__(self, buffers: Sequence[str] = ()) -> None:
        self._buffers = buffers
        """Names of the buffers that are checked."""

    def update(self, row: StepMetrics) -> list[Finding]:
        what: list[str] = []
        if row.verdict is Verdict.NONFINITE:
            if not math.isfinite(row.loss):
                what.append(f"the loss is {row.loss}")
            if row.nonfinite > 0:
                what.append(f"{row.nonfinite:.0f} gradient values are not finite")
            elif not math.isfinite(row.norm):
                what.append("the gradients are finite, but too large for a norm in float32")
            if row.nonfinite_buffers > 0:
                what.append(self._about_buffers(row))
        if row.nonfinite_params > 0:
            what.append(f"{row.nonfinite_params:.0f} values in weights or buffers are not finite")
        if not what:
            return []
        evidence: dict[str, Any] = {"loss": row.loss, "norm": row.norm, "nonfinite": row.nonfinite}
        return [
            Finding(
                step=row.step,
                attempt=row.attempt,
                time=row.time,
                detector="nonfinite",
                pattern=Pattern.NONFINITE,
                detail=", ".join(what),
                evidence=evidence | where(row),
            )
        ]

    def _about_buffers(self, row: StepMetrics) -> str:
        known = 0 <= row.first_nonfinite_buffer < len(self._buffers)
        first = f"buffer {self._buffers[row.first_nonfinite_buffer]}" if known else "a buffer of the model"
        more = f" and {row.nonfinite_buffers - 1:.0f} more" if row.nonfinite_buffers > 1 else ""
        return f"the batch made {first}{more} non-finite"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def where(row: StepMetrics) -> dict[str, int]:
    """The micro-batch and the process that brought the trouble, where they are known."""
    found = {"bad_microbatch": row.bad_microbatch} if row.bad_microbatch >= 0 and row.num_microbatches > 1 else {}
    return found | ({"culprit_rank": row.rank} if row.rank >= 0 else {})

"""A finite update far outside anything this run has accepted."""

from __future__ import annotations

from typing import Any

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.nonfinite import where
from surefoot.records import Finding, Pattern, StepMetrics, Verdict


class NormOutlier:
    """Speaks when the gate refused a finite update, and names the limit that it broke."""

    def __init__(self, normal: Baselines) -> None:
        self._normal = normal

    def update(self, row: StepMetrics) -> list[Finding]:
        if row.verdict is not Verdict.NORM_OUTLIER:
            return []
        detail, exceeded = self._exceeded(row)
        return [
            Finding(
                step=row.step,
                attempt=row.attempt,
                time=row.time,
                detector="norm_outlier",
                pattern=Pattern.JUMP,
                detail=detail,
                evidence={"loss": row.loss, "norm": row.norm, "limit": row.norm_limit} | exceeded | where(row),
            )
        ]

    def _exceeded(self, row: StepMetrics) -> tuple[str, dict[str, float]]:
        """Which limit the update broke, in words and as evidence."""
        if row.norm > row.norm_limit:
            times = row.norm / row.norm_limit
            return f"gradient norm {row.norm:.4g}, {times:.3g} times the limit of {row.norm_limit:.4g}", {}
        ceiling = self._normal.asked.loss_ceiling
        if row.loss > ceiling:
            return f"loss {row.loss:.4g}, above the ceiling of {ceiling:.4g} set after trouble", {"ceiling": ceiling}
        return "refused because the update of another optimizer from the same backward was", {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state

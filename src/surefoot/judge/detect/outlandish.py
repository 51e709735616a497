"""A finite update far outside anything this run has accepted."""

from __future__ import annotations

from typing import Any

from surefoot.judge.detect.nonfinite import where
from surefoot.records import Finding, Pattern, Row, Verdict


class Outlandish:
    """Speaks when the gate found a norm above its limit."""

    def update(self, row: Row) -> list[Finding]:
        if row.verdict is not Verdict.OUTLANDISH:
            return []
        return [
            Finding(
                step=row.step,
                attempt=row.attempt,
                time=row.time,
                detector="outlandish",
                pattern=Pattern.JUMP,
                detail=f"gradient norm {row.norm:.4g}, {row.norm / row.limit:.3g} times the limit of {row.limit:.4g}",
                evidence={"loss": row.loss, "norm": row.norm, "limit": row.limit} | where(row),
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state

"""What the gate would have said with other figures, worked out from the norms it wrote down."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from surefoot.judge.policy import Policy
from surefoot.records import StepMetrics, Verdict

Baseline = tuple[float, float, int]
"""Recent largest norm, largest ever, norms counted."""
FIGURES = ("max_norm_ratio", "warmup", "norm_max_decay")


@dataclass(slots=True)
class Rule:
    """The rule of `gate.decide` with the figures of one policy, for the rows of one optimizer."""

    policy: Policy
    baseline: Baseline = (0.0, 0.0, 0)
    _was: dict[int, Baseline] = field(default_factory=dict)

    def limit(self) -> float:
        recent, ever, count = self.baseline
        return max(recent * self.policy.max_norm_ratio, ever) if count >= self.policy.warmup else math.inf

    def take(self, row: StepMetrics, *, landed: bool) -> None:
        recent, ever, count = self.baseline
        if landed and row.norm > 0:
            self.baseline = max(recent * self.policy.norm_max_decay, row.norm), max(ever, row.norm), count + 1
        self._was[row.attempt] = self.baseline

    def rewound(self, attempt: int) -> None:
        """The gate goes back with the run."""
        self._was = {at: was for at, was in self._was.items() if at <= attempt}
        self.baseline = next(reversed(self._was.values()), (0.0, 0.0, 0))


class Regate:
    """Gives rows the verdict of another policy, where it was the gate's own rule that let them land or refused them.

    What was refused for another reason, such as a ceiling of a restraint, stays refused.
    """

    def __init__(self, then: Policy, now: Policy) -> None:
        self._policies = (then, now)
        self._rules: dict[int, tuple[Rule, Rule]] = {}

    def __call__(self, row: StepMetrics) -> StepMetrics:
        then, now = self._rules.setdefault(row.optimizer, (Rule(self._policies[0]), Rule(self._policies[1])))
        explained = row.verdict is _verdict(row, then.limit())
        limit = now.limit()
        verdict = _verdict(row, limit) if explained else row.verdict
        then.take(row, landed=row.applied)
        now.take(row, landed=verdict is Verdict.APPLIED)
        if verdict is row.verdict and verdict is not Verdict.NORM_OUTLIER:
            return row
        return replace(row, verdict=verdict, norm_limit=limit if explained and math.isfinite(limit) else row.norm_limit)

    def rewound(self, attempt: int) -> None:
        for rules in self._rules.values():
            for rule in rules:
                rule.rewound(attempt)


def _verdict(row: StepMetrics, limit: float) -> Verdict | None:
    """What the rule says; nothing of updates that were not finite, or never came to it."""
    if row.verdict not in (Verdict.APPLIED, Verdict.NORM_OUTLIER):
        return None
    return Verdict.NORM_OUTLIER if row.norm > limit else Verdict.APPLIED

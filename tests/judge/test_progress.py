"""What is judged when the loss does not show whether a run learns."""

from __future__ import annotations

import math
import random

import pytest
from made_rows import Source, actions, judged, of

from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.records import Action, Finding, JudgedBy, StepMetrics


def about_zero(source: Source, count: int, level: float = 0.0, seed: int = 0) -> list[StepMetrics]:
    """Losses of a policy gradient: rounding errors around zero, and a penalty on top."""
    chance = random.Random(seed)
    return [source.row(loss=level + chance.gauss(0.0, 1e-8)) for _ in range(count)]


def test_rising_penalty_on_a_loss_around_zero_is_not_judged() -> None:
    judge, source = Judge(Policy()), Source(0)
    rows = about_zero(source, 40)
    for k in range(20):  # each level is far above the baseline before it
        rows += about_zero(source, 40, level=1e-6 * 2.5**k, seed=k)
    events = judged(judge, rows)
    assert actions(events) == []
    (finding,) = of(Finding, events)
    assert finding.detector == "progress"
    assert "guard.watch(loss, progress=...)" in finding.detail


def test_falling_loss_that_crosses_zero_is_judged() -> None:
    judge, source = Judge(Policy()), Source(0, loss=3.0, floor=0.0, half=1e9, noise=0.0)
    chance = random.Random(0)
    falling = [source.row(loss=3.0 - 0.02 * k + chance.gauss(0.0, 0.05)) for k in range(300)]
    assert judged(judge, falling) == []
    assert of(Finding, judged(judge, source.rows(12, loss=40.0))), "a jump is still found"


def test_reported_progress_is_judged_instead_of_the_loss() -> None:
    judge, source = Judge(Policy()), Source(0)
    chance = random.Random(0)

    def named(level: float, count: int) -> list[StepMetrics]:
        given = {"loss": 0.0, "judged_by": JudgedBy.PROGRESS}
        return [source.row(**given, progress=level + chance.gauss(0.0, 0.05)) for _ in range(count)]

    assert judged(judge, named(3.0, 100)) == []
    events = judged(judge, named(60.0, 40))
    assert Action.REWIND in actions(events)
    (decision,) = [e for e in events if getattr(e, "action", None) is Action.REWIND]
    assert decision.overrides.loss_ceiling == math.inf, "a ceiling on progress is not applied to the loss"


@pytest.mark.parametrize("times", [1.0, 50.0])
def test_loss_is_not_judged_when_switched_off(times: float) -> None:
    judge, source = Judge(Policy()), Source(0)
    judged_by = {"judged_by": JudgedBy.NOTHING}
    assert judged(judge, [*source.rows(100, **judged_by), *source.rows(40, times=times, **judged_by)]) == []


def test_loss_baselines_survive_a_resume() -> None:
    judge, source = Judge(Policy()), Source(0)
    judged(judge, about_zero(source, 100))
    resumed = Judge(Policy())
    resumed.load_state_dict(judge.state_dict())
    assert judged(resumed, about_zero(source, 60, level=1.0)) == []

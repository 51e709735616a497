"""What is decided from rows, within the limits of a policy."""

from __future__ import annotations

import math
from typing import Any

import pytest

from surefoot.judge.history import History
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.records import Decision, Event, Finding, StepMetrics, Verdict

REFUSED = [(Verdict.NONFINITE, math.nan, 3), (Verdict.NONFINITE, 1.0, 16), (Verdict.NORM_OUTLIER, 1.0, 6)]
"""Refusals in a row before a run goes back: soon when not even the loss is finite, late when refusing is enough."""


def row(attempt: int, verdict: Verdict = Verdict.APPLIED, **values: float) -> StepMetrics:
    bad = {"loss": math.nan, "nonfinite": 3.0, "norm": math.nan} if verdict is Verdict.NONFINITE else {}
    far = {"norm": 900.0, "norm_limit": 100.0} if verdict is Verdict.NORM_OUTLIER else {}
    told: dict[str, Any] = {"loss": 1.0, "norm": 1.0} | bad | far | values
    return StepMetrics(step=0, attempt=attempt, time=float(attempt), verdict=verdict, **told)


def decisions(events: list[Event]) -> list[tuple[str, bool]]:
    return [(e.action, e.applied) for e in events if isinstance(e, Decision)]


@pytest.mark.parametrize("verdict", [Verdict.NONFINITE, Verdict.NORM_OUTLIER])
def test_a_refusal_is_decided_with_its_reason(verdict: Verdict) -> None:
    events = Judge(Policy()).update(row(3, verdict))
    assert [type(e) for e in events] == [Finding, Decision]
    assert decisions(events) == [("refuse", True)]
    decision = events[-1]
    assert isinstance(decision, Decision)
    assert isinstance(events[0], Finding)
    assert decision.reason == events[0].detail
    assert (decision.attempt, decision.time) == (3, 3.0)


def test_nothing_is_decided_over_healthy_and_dropped_updates() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=1, max_consecutive_overflows=1))
    assert judge.update(row(0)) == []
    assert judge.update(row(1, Verdict.DISCARDED)) == []


@pytest.mark.parametrize("verdict", [Verdict.NONFINITE, Verdict.NORM_OUTLIER])
def test_refusals_in_a_row_stop_the_run(verdict: Verdict) -> None:
    judge = Judge(Policy(max_consecutive_vetoes=2))
    said = [decisions(judge.update(row(i, verdict))) for i in range(2)]
    assert said == [[("refuse", True)], [("refuse", True), ("stop", True)]]


@pytest.mark.parametrize(("verdict", "loss", "doubt"), REFUSED)
def test_refusals_in_a_row_first_take_the_run_back(verdict: Verdict, loss: float, doubt: int) -> None:
    judge = Judge(Policy())
    said = [decisions(judge.update(row(i, verdict, loss=loss))) for i in range(doubt)]
    assert said == [[("refuse", True)]] * (doubt - 1) + [[("refuse", True), ("rewind", True)]]


def test_what_happens_until_the_run_is_back_is_of_no_account() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=6))
    for i in range(3):
        judge.update(row(i, Verdict.NONFINITE))
    until = [d for i in range(3, 9) for d in decisions(judge.update(row(i, Verdict.NONFINITE)))]
    assert until == [("refuse", True)] * 6, "rows that were under way are still refused, and no more"
    judge.rewound(0, 0)
    assert not judge.quiet, "no update has landed yet"
    assert decisions(judge.update(row(9))) == []
    assert judge.quiet
    assert decisions(judge.update(row(10, Verdict.NONFINITE))) == [("refuse", True)], "the count begins anew"


def test_a_run_that_cannot_go_back_is_stopped_when_nothing_is_left() -> None:
    judge = Judge(Policy())
    said: list[Decision] = []
    for i in range(20):
        events = judge.update(row(i, Verdict.NONFINITE))
        said += [e for e in events if isinstance(e, Decision) and e.action != "refuse"]
        if said and said[-1].action == "rewind":
            judge.failed(said[-1], "no states are kept")
        if said and said[-1].action == "stop":
            break
    assert [d.action for d in said] == ["rewind"] * 3 + ["stop"]
    assert len({d.remedy for d in said[:3]}) == 3, "each time something else"
    assert "none of the remaining remedies can be applied" in said[-1].reason
    assert "the loss is nan" in said[-1].reason


def test_the_reason_to_stop_says_what_happened_and_what_to_do() -> None:
    def reason(verdict: Verdict, **values: float) -> str:
        *_, last = Judge(Policy(max_consecutive_vetoes=1)).update(row(5, verdict, **values))
        assert isinstance(last, Decision)
        return last.reason

    assert "1 updates in a row were refused" in reason(Verdict.NONFINITE)
    assert "attempt 5" in reason(Verdict.NONFINITE)
    assert "the loss is nan" in reason(Verdict.NONFINITE)
    assert "bfloat16" in reason(Verdict.NONFINITE)
    assert "Policy(max_norm_ratio=" in reason(Verdict.NORM_OUTLIER)
    assert "checkpoint" in reason(Verdict.NONFINITE, nonfinite_params=4.0)


def test_an_accepted_update_resets_the_count() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=2))
    for i in range(0, 20, 2):
        assert decisions(judge.update(row(i, Verdict.NONFINITE))) == [("refuse", True)]
        assert decisions(judge.update(row(i + 1))) == []


def test_dropped_updates_do_not_reset_the_count() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=2))
    judge.update(row(0, Verdict.NONFINITE))
    judge.update(row(1, Verdict.DISCARDED))
    assert ("stop", True) in decisions(judge.update(row(2, Verdict.NONFINITE)))


def test_one_update_of_two_optimizers_is_refused_once() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=2))
    said: list[tuple[str, bool]] = []
    for optimizer in (0, 1):
        said += decisions(judge.update(row(0, Verdict.NONFINITE, optimizer=optimizer)))
    assert ("stop", True) not in said, "one attempt is one refused update, however many optimizers took part"


def test_overflows_have_a_limit_of_their_own() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=2, max_consecutive_overflows=4))
    said = [decisions(judge.update(row(i, Verdict.OVERFLOW, loss_scale=2.0 ** (4 - i)))) for i in range(4)]
    assert said == [[], [], [], [("stop", True)]]
    judge = Judge(Policy(max_consecutive_overflows=1))
    (stop,) = judge.update(row(0, Verdict.OVERFLOW, loss_scale=0.5))
    assert isinstance(stop, Decision)
    assert "loss scale" in stop.reason
    assert "0.5" in stop.reason


def test_observing_decides_the_same_and_applies_nothing() -> None:
    judge = Judge(Policy(observe=True, max_consecutive_vetoes=2))
    said = [decisions(judge.update(row(i, Verdict.NONFINITE))) for i in range(2)]
    assert said == [[("refuse", False)], [("refuse", False), ("stop", False)]]


@pytest.mark.parametrize(
    "name", ["max_norm_ratio", "warmup", "max_consecutive_vetoes", "max_consecutive_overflows", "weights_every"]
)
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_policy_refuses_figures_that_make_no_sense(name: str, value: float) -> None:
    figures: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        Policy(**figures)


@pytest.mark.parametrize("fade", [0.0, -0.5, 1.5, math.nan])
def test_a_policy_refuses_a_fade_that_makes_no_sense(fade: float) -> None:
    with pytest.raises(ValueError, match="norm_max_decay"):
        Policy(norm_max_decay=fade)


def test_the_history_keeps_the_last_hundred_and_the_differences() -> None:
    history = History()
    said = [history.add(float(i * i), float(i)) for i in range(150)]
    assert len(history.losses) == len(history.norms) == 100
    assert history.losses[0] == 50.0**2
    assert history.norms[-1] == 149.0
    assert math.isnan(said[0][0])
    assert math.isnan(said[1][1])
    assert said[1][0] == 1.0
    assert said[2] == (3.0, 2.0)
    assert said[100] == (199.0, 2.0)

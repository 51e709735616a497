"""Decisions from rows, within the limits of a policy."""

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
    fields: dict[str, Any] = {"loss": 1.0, "norm": 1.0} | bad | far | values
    return StepMetrics(step=0, attempt=attempt, time=float(attempt), verdict=verdict, **fields)


def decisions(events: list[Event]) -> list[tuple[str, bool]]:
    return [(e.action, e.applied) for e in events if isinstance(e, Decision)]


@pytest.mark.parametrize("verdict", [Verdict.NONFINITE, Verdict.NORM_OUTLIER])
def test_refusal_has_a_reason(verdict: Verdict) -> None:
    events = Judge(Policy()).update(row(3, verdict))
    assert [type(e) for e in events] == [Finding, Decision]
    assert decisions(events) == [("refuse", True)]
    decision = events[-1]
    assert isinstance(decision, Decision)
    assert isinstance(events[0], Finding)
    assert decision.reason == events[0].detail
    assert (decision.attempt, decision.time) == (3, 3.0)


def test_no_decision_for_applied_and_discarded_updates() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=1))
    assert judge.update(row(0)) == []
    assert judge.update(row(1, Verdict.DISCARDED)) == []


@pytest.mark.parametrize("verdict", [Verdict.NONFINITE, Verdict.NORM_OUTLIER])
def test_consecutive_refusals_stop_the_run(verdict: Verdict) -> None:
    judge = Judge(Policy(max_consecutive_vetoes=2))
    decided = [decisions(judge.update(row(i, verdict))) for i in range(2)]
    assert decided == [[("refuse", True)], [("refuse", True), ("stop", True)]]


@pytest.mark.parametrize(("verdict", "loss", "doubt"), REFUSED)
def test_consecutive_refusals_rewind_first(verdict: Verdict, loss: float, doubt: int) -> None:
    judge = Judge(Policy())
    decided = [decisions(judge.update(row(i, verdict, loss=loss))) for i in range(doubt)]
    assert decided == [[("refuse", True)]] * (doubt - 1) + [[("refuse", True), ("rewind", True)]]


def test_rows_before_a_pending_rewind_are_ignored() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=6))
    for i in range(3):
        judge.update(row(i, Verdict.NONFINITE))
    until = [d for i in range(3, 9) for d in decisions(judge.update(row(i, Verdict.NONFINITE)))]
    assert until == [("refuse", True)] * 6, "rows already measured are refused without further decisions"
    judge.rewound(0, 0)
    assert not judge.quiet, "no update has been applied yet"
    assert decisions(judge.update(row(9))) == []
    assert judge.quiet
    assert decisions(judge.update(row(10, Verdict.NONFINITE))) == [("refuse", True)], "the count restarts"


def test_run_without_snapshots_is_stopped_after_all_remedies_failed() -> None:
    judge = Judge(Policy())
    decided: list[Decision] = []
    for i in range(20):
        events = judge.update(row(i, Verdict.NONFINITE))
        decided += [e for e in events if isinstance(e, Decision) and e.action != "refuse"]
        if decided and decided[-1].action == "rewind":
            judge.failed(decided[-1], "no snapshots are kept")
        if decided and decided[-1].action == "stop":
            break
    assert [d.action for d in decided] == ["rewind"] * 3 + ["stop"]
    assert len({d.remedy for d in decided[:3]}) == 3, "a different remedy each time"
    assert "none of the remaining remedies can be applied" in decided[-1].reason
    assert "the loss is nan" in decided[-1].reason


def test_stop_reason_names_the_fault_and_the_way_out() -> None:
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


def test_applied_update_resets_the_refusal_count() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=2))
    for i in range(0, 20, 2):
        assert decisions(judge.update(row(i, Verdict.NONFINITE))) == [("refuse", True)]
        assert decisions(judge.update(row(i + 1))) == []


def test_discarded_updates_do_not_reset_the_refusal_count() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=2))
    judge.update(row(0, Verdict.NONFINITE))
    judge.update(row(1, Verdict.DISCARDED))
    assert ("stop", True) in decisions(judge.update(row(2, Verdict.NONFINITE)))


def test_refusal_of_two_optimizers_counts_once() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=2))
    decided: list[tuple[str, bool]] = []
    for optimizer in (0, 1):
        decided += decisions(judge.update(row(0, Verdict.NONFINITE, optimizer=optimizer)))
    assert ("stop", True) not in decided, "one attempt is one refused update, however many optimizers took part"


def test_overflows_have_their_own_limit() -> None:
    judge = Judge(Policy(max_consecutive_vetoes=1))
    events = [judge.update(row(i, Verdict.OVERFLOW, loss_scale=2.0 ** (1 - i))) for i in range(3)]
    assert [decisions(decided) for decided in events] == [[], [], [("stop", True)]]
    (stop,) = events[-1]
    assert isinstance(stop, Decision)
    assert "loss scale" in stop.reason
    assert "0.5" in stop.reason


def test_observe_decides_the_same_and_applies_nothing() -> None:
    judge = Judge(Policy(observe=True, max_consecutive_vetoes=2))
    decided = [decisions(judge.update(row(i, Verdict.NONFINITE))) for i in range(2)]
    assert decided == [[("refuse", False)], [("refuse", False), ("stop", False)]]


@pytest.mark.parametrize("name", ["max_norm_ratio", "warmup", "max_consecutive_vetoes", "weights_every"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_policy_refuses_invalid_values(name: str, value: float) -> None:
    values: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        Policy(**values)


def test_history_keeps_the_last_hundred_values_and_differences() -> None:
    history = History()
    diffs = [history.add(float(i * i), float(i)) for i in range(150)]
    assert len(history.losses) == len(history.norms) == 100
    assert history.losses[0] == 50.0**2
    assert history.norms[-1] == 149.0
    assert math.isnan(diffs[0][0])
    assert math.isnan(diffs[1][1])
    assert diffs[1][0] == 1.0
    assert diffs[2] == (3.0, 2.0)
    assert diffs[100] == (199.0, 2.0)

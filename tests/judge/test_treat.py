"""What is tried, in which order, whether it helped, and how a run is let go again."""

from __future__ import annotations

import math

import pytest
from made_rows import Source, actions, judged, of, trained

from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.judge.thresholds import REPEAT_COUNT
from surefoot.records import Action, Decision, Event, Finding, Outcome, StepMetrics, StepOverrides


def dies(source: Source) -> list[StepMetrics]:
    return [source.nan() for _ in range(3)]


def back(judge: Judge, source: Source, events: list[Event]) -> Decision:
    """Carry the rewind among these events out."""
    assert actions(events) == [Action.REWIND]
    (decision,) = [d for d in of(Decision, events) if d.action is Action.REWIND]
    source.step = 140
    judge.rewound(140, 140)
    return decision


def held(decision: Decision) -> StepOverrides:
    assert decision.overrides is not None
    return decision.overrides


def test_the_ladder_goes_up_and_ends_with_a_stop_that_says_why() -> None:
    judge, source = trained()
    tried: list[Decision] = []
    outcomes: list[Outcome] = []
    for _ in range(3):
        events = judged(judge, dies(source))
        outcomes += of(Outcome, events)
        tried.append(back(judge, source, events))
        outcomes += of(Outcome, judged(judge, source.rows(5)))
    events = judged(judge, dies(source))
    outcomes += of(Outcome, events)
    assert actions(events) == [Action.STOP]
    stop = of(Decision, events)[-1]
    assert "3 attempts in a row did not help" in stop.reason
    assert "the loss is nan" in stop.reason
    assert [o.helped for o in outcomes] == [False] * 3
    assert len({d.remedy for d in tried}) == 3
    rates = [held(d).lr_factor for d in tried]
    assert rates == sorted(rates, reverse=True), "from the least harmful on"
    assert rates[0] == 1.0
    assert [d.reset_optimizer for d in tried] == [False, False, True]


def test_progress_resets_the_ladder() -> None:
    judge, source = trained()
    rungs: list[str] = []
    for _ in range(5):
        rungs.append(back(judge, source, judged(judge, dies(source))).remedy)
        (outcome,) = of(Outcome, judged(judge, source.rows(40)))
        assert outcome.helped
    assert len(set(rungs)) == 1, "each time the least harmful one, and never a stop"


def test_an_outcome_has_numbers() -> None:
    judge, source = trained()
    before = judge.signals.loss.median
    back(judge, source, judged(judge, dies(source)))
    (good,) = of(Outcome, judged(judge, source.rows(40)))
    assert good.action is Action.REWIND
    assert good.values["before"] == pytest.approx(before)
    assert good.values["updates"] == Policy().healthy_steps_to_confirm
    assert good.values["loss"] == pytest.approx(before, rel=0.2)
    assert "it helped" in good.detail
    back(judge, source, judged(judge, dies(source)))
    judged(judge, source.rows(3))
    (bad,) = of(Outcome, judged(judge, dies(source)))
    assert not bad.helped
    assert bad.values["updates"] == 3


def test_an_outcome_is_told_by_the_losses_after_it() -> None:
    judge, source = trained()
    first = back(judge, source, judged(judge, dies(source)))
    (outcome,) = of(Outcome, judged(judge, source.rows(40, times=1.6)))
    assert not outcome.helped
    assert outcome.values["loss"] > 1.3 * outcome.values["before"]
    judged(judge, source.rows(20))
    second = back(judge, source, judged(judge, dies(source)))
    assert second.remedy != first.remedy, "what did not help is not tried again"
    judged(judge, source.rows(60, times=1.6))
    judged(judge, source.rows(Policy().relax_after + 40))
    assert back(judge, source, judged(judge, dies(source))).remedy == first.remedy, "until there was progress"


def overflows(source: Source, scale: float = 1024.0) -> StepMetrics:
    return source.nan(loss=math.inf, loss_scale=scale)


def now_and_then(source: Source, scale: float = 1024.0) -> list[StepMetrics]:
    """Losses that float16 cannot hold, among others that it can."""
    sound = [source.rows(2, loss_scale=scale) for _ in range(REPEAT_COUNT)]
    return [row for rows in sound for row in (*rows, overflows(source, scale))]


def test_losses_that_float16_cannot_hold_now_and_then_are_computed_in_float32_without_a_way_back() -> None:
    judge, source = trained(source=Source(1, loss_scale=1024.0))
    decision = of(Decision, judged(judge, now_and_then(source)))[-1]
    assert decision.action is Action.CONSTRAIN
    assert held(decision).float32
    assert not held(decision).max_lr, "nothing but the format is to blame"
    (outcome,) = of(Outcome, judged(judge, source.rows(40)))
    assert outcome.helped


def test_losses_that_are_infinite_in_another_format_are_refused_and_no_more() -> None:
    judge, source = trained()
    assert actions(judged(judge, now_and_then(source, math.nan))) == []


def test_when_float32_alone_does_not_help_the_run_goes_back_in_float32() -> None:
    judge, source = trained(source=Source(1, loss_scale=1024.0))
    judged(judge, [overflows(source) for _ in range(3)])
    events = judged(judge, [*source.rows(5), *(overflows(source) for _ in range(3))])
    assert [o.helped for o in of(Outcome, events)] == [False]
    assert held(back(judge, source, events)).float32


def test_updates_made_before_float32_is_in_force_are_not_held_against_it() -> None:
    judge, source = trained(source=Source(1, loss_scale=1024.0))
    events = judged(judge, [overflows(source) for _ in range(3 + 4)])
    assert actions(events) == [Action.CONSTRAIN]
    (outcome,) = of(Outcome, judged(judge, source.rows(40)))
    assert outcome.helped


def test_signs_of_before_a_restraint_are_not_held_against_it() -> None:
    """The overflows are over, but the loss scale is low; it is set back, and what is under way still tells of that."""
    judge, source = trained(source=Source(1, loss_scale=2.0**16))
    events = judged(judge, [overflows(source) for _ in range(3 + 4)])
    events += judged(judge, source.rows(6, loss_scale=2.0**4))
    assert actions(events) == [Action.CONSTRAIN] * 2
    assert of(Decision, events)[-1].loss_scale == 2.0**16
    assert actions(judged(judge, source.rows(40))) == []


def test_where_nothing_has_landed_since_the_first_sign_the_last_state_before_it_will_do() -> None:
    judge, source = trained()
    first = back(judge, source, judged(judge, dies(source)))
    assert (first.max_attempt, first.onset_known) == (150, True)
    judged(judge, source.rows(5))
    second = back(judge, source, judged(judge, dies(source)))
    assert not second.onset_known, "that did not help: only a state that proved good will do"


def test_a_loss_that_has_risen_may_have_its_reason_in_a_state_before() -> None:
    judge, source = trained()
    decision = back(judge, source, judged(judge, [source.row(lr=4e-2, times=1.25**k) for k in range(1, 6)]))
    assert not decision.onset_known


def test_a_trouble_of_another_kind_begins_with_what_was_not_tried_yet() -> None:
    judge, source = trained(source=Source(1, loss_scale=1024.0))
    tried = [of(Decision, judged(judge, [overflows(source) for _ in range(3)]))[-1].remedy]
    events = judged(judge, [*source.rows(5), *dies(source)])
    tried.append(back(judge, source, events).remedy)
    events = judged(judge, [*source.rows(5), *(overflows(source) for _ in range(3))])
    tried.append(back(judge, source, events).remedy)
    assert len(set(tried)) == 3


def test_a_run_has_only_so_many_actions() -> None:
    judge, source = trained(Policy(max_actions=2))
    for _ in range(2):
        back(judge, source, judged(judge, dies(source)))
        judged(judge, source.rows(40))
    events = judged(judge, dies(source))
    assert actions(events) == [Action.STOP]
    assert "the limit of 2 actions is reached" in of(Decision, events)[-1].reason


def loosened(events: list[Event]) -> list[StepOverrides]:
    return [held(d) for d in of(Decision, events) if d.action is Action.RELAX]


def test_what_is_not_needed_is_dropped_after_a_while() -> None:
    judge, source = trained()
    asked = held(back(judge, source, judged(judge, dies(source))))
    assert asked.max_lr
    assert asked.norm_ceiling
    assert judged(judge, source.rows(95)) != []
    events = judged(judge, source.rows(10))
    assert loosened(events) == [StepOverrides()]
    (decision,) = of(Decision, events)
    assert decision.reason.startswith("100 healthy updates")
    assert actions(judged(judge, source.rows(600))) == [], "that was all"


def test_a_cap_that_is_still_needed_is_widened_step_by_step() -> None:
    judge, source = trained()
    rising = [source.row(lr=4e-2, times=1.25**k) for k in range(1, 6)]
    asked = held(back(judge, source, judged(judge, rising)))
    assert asked.max_lr == (1e-3,)
    looser = loosened(judged(judge, source.rows(250, lr=4e-3)))
    caps = [r.max_lr[0] for r in looser]
    assert len(caps) > 1
    assert caps == pytest.approx([1e-3 * 1.5 ** (k + 1) for k in range(len(caps))])
    assert all(not r.norm_ceiling for r in looser), "nothing was refused"


def test_a_cap_is_not_widened_while_the_loop_still_asks_for_what_did_the_harm() -> None:
    judge, source = trained()
    rising = [source.row(lr=4e-2, times=1.25**k) for k in range(1, 6)]
    asked = held(back(judge, source, judged(judge, rising)))
    looser = loosened(judged(judge, source.rows(800, lr=4e-2)))
    assert looser, "the rest of it is loosened"
    assert {r.max_lr for r in looser} == {asked.max_lr}


def test_a_momentum_that_is_still_wrong_stays_capped() -> None:
    judge, source = trained()
    back(judge, source, judged(judge, source.rows(1, momentum=1.02)))
    (looser,) = loosened(judged(judge, source.rows(250, momentum=1.02)))
    assert looser.max_momentum == (0.9,)
    assert looser.max_lr == ()


def test_ceilings_that_refused_something_are_kept() -> None:
    judge, source = trained()
    asked = held(back(judge, source, judged(judge, dies(source))))
    rows = [*source.rows(30), source.far(norm=30.0, norm_limit=6.0), *source.rows(130)]
    (looser,) = loosened(judged(judge, rows))
    assert looser.norm_ceiling == asked.norm_ceiling
    assert looser.loss_ceiling == asked.loss_ceiling
    assert looser.max_lr == ()


def test_a_batch_that_no_ceiling_refused_keeps_none() -> None:
    judge, source = trained()
    back(judge, source, judged(judge, dies(source)))
    assert loosened(judged(judge, [*source.rows(30), source.nan(), *source.rows(130)])) == [StepOverrides()]


def test_a_cap_outlives_the_next_trouble() -> None:
    """Rows tell the rate that the loop has set, however it is held."""
    judge, source = trained()
    back(judge, source, judged(judge, [source.row(lr=4e-2, times=1.25**k) for k in range(1, 6)]))
    judged(judge, source.rows(80, lr=4e-2))
    again = held(back(judge, source, judged(judge, [source.nan(lr=4e-2) for _ in range(3)])))
    assert again.max_lr == (1e-3,)


def test_what_could_not_be_done_is_not_in_force() -> None:
    judge, source = trained()
    events = judged(judge, dies(source))
    judge.failed(of(Decision, events)[-1], "no states are kept")
    assert actions(judged(judge, source.rows(300))) == [], "there is nothing to loosen"
    (again,) = [d for d in of(Decision, judged(judge, dies(source))) if d.action is Action.REWIND]
    assert again.remedy != of(Decision, events)[-1].remedy, "the next rung"


def test_what_still_stands_out_after_a_rewind_is_the_new_normal() -> None:
    judge, source = trained()
    assert held(back(judge, source, judged(judge, dies(source)))).norm_ceiling
    judged(judge, source.rows(3))
    events = judged(judge, [source.far(norm=30.0, norm_limit=6.0) for _ in range(6)])
    assert actions(events) == [Action.ACCEPT]
    accepted = held(of(Decision, events)[-1])
    assert accepted.norm_ceiling == ()
    assert accepted.max_lr, "it is only the ceilings that were wrong"
    after = judged(judge, source.rows(150, norm=30.0))
    assert Action.REWIND not in actions(after)
    assert Action.STOP not in actions(after)


def test_without_a_rewind_before_it_what_stands_out_is_no_new_normal() -> None:
    judge, source = trained()
    assert actions(judged(judge, [source.far() for _ in range(6)])) == [Action.REWIND]


def test_observing_decides_each_trouble_once_and_does_nothing() -> None:
    judge, source = trained(Policy(observe=True))
    first = judged(judge, [*[source.nan() for _ in range(15)], *source.rows(150)])
    second = judged(judge, [*[source.nan() for _ in range(15)], *source.rows(150)])
    rising = judged(judge, [source.row(lr=4e-2, times=1.2**k) for k in range(1, 20)])
    for events in (first, second, rising):
        assert actions(events) == [Action.REWIND]
        assert not any(d.applied for d in of(Decision, events))
        assert of(Outcome, events) == [], "nothing was done that could have helped"


def test_observing_never_decides_twice_in_a_row() -> None:
    judge, source = trained(Policy(observe=True))
    attempts = [d.attempt for row in source.rows(300, times=9.0) for d in of(Decision, judge.update(row))]
    assert len(attempts) == 1


def test_a_state_is_proven_by_the_healthy_updates_after_it() -> None:
    judge, source = Judge(Policy(healthy_steps_to_trust=10)), Source(1)
    assert judge.proven == -1
    judged(judge, source.rows(100))
    assert judge.proven == 89
    assert judge.quiet
    judged(judge, [source.nan()])
    assert not judge.quiet
    judged(judge, source.rows(30))
    assert judge.proven == 89, "while there is trouble nothing is proven"
    assert not judge.quiet, "nor is a state taken"
    judged(judge, source.rows(60))
    assert judge.quiet
    assert judge.proven == source.attempt - 1 - 10


def test_after_a_rewind_nothing_later_is_proven() -> None:
    judge, source = trained(rows=150)
    assert judge.proven == 139
    judged(judge, dies(source))
    judge.rewound(120, 120)
    assert judge.proven == 120
    assert not judge.quiet, "no update has landed yet"
    judged(judge, source.rows(1))
    assert judge.quiet


def test_a_slow_step_or_a_leak_does_not_disturb_the_quiet() -> None:
    judge, source = trained()
    rows = [source.row(seconds=0.1) for _ in range(60)] + [source.row(seconds=2.0) for _ in range(20)]
    assert [f.detector for f in of(Finding, judged(judge, rows))] == ["slow_steps"]
    assert judge.quiet

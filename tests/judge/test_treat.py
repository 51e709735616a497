"""Remedies: which are tried in which order, whether they helped, and how overrides are lifted."""

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


def apply_rewind(judge: Judge, source: Source, events: list[Event]) -> Decision:
    """Carry out the rewind decided in these events."""
    assert actions(events) == [Action.REWIND]
    (decision,) = [d for d in of(Decision, events) if d.action is Action.REWIND]
    source.step = 140
    judge.rewound(140, 140)
    return decision


def overrides_of(decision: Decision) -> StepOverrides:
    assert decision.overrides is not None
    return decision.overrides


def test_remedies_escalate_and_end_with_a_stop_and_reason() -> None:
    judge, source = trained()
    tried: list[Decision] = []
    outcomes: list[Outcome] = []
    for _ in range(3):
        events = judged(judge, dies(source))
        outcomes += of(Outcome, events)
        tried.append(apply_rewind(judge, source, events))
        outcomes += of(Outcome, judged(judge, source.rows(5)))
    events = judged(judge, dies(source))
    outcomes += of(Outcome, events)
    assert actions(events) == [Action.STOP]
    stop = of(Decision, events)[-1]
    assert "3 attempts in a row did not help" in stop.reason
    assert "the loss is nan" in stop.reason
    assert [o.helped for o in outcomes] == [False] * 3
    assert len({d.remedy for d in tried}) == 3
    rates = [overrides_of(d).lr_factor for d in tried]
    assert rates == sorted(rates, reverse=True), "the mildest remedy first"
    assert rates[0] == 1.0
    assert [d.reset_optimizer for d in tried] == [False, False, True]


def test_progress_resets_the_escalation() -> None:
    judge, source = trained()
    remedies: list[str] = []
    for _ in range(5):
        remedies.append(apply_rewind(judge, source, judged(judge, dies(source))).remedy)
        (outcome,) = of(Outcome, judged(judge, source.rows(40)))
        assert outcome.helped
    assert len(set(remedies)) == 1, "the mildest remedy each time, and never a stop"


def test_outcome_has_numbers() -> None:
    judge, source = trained()
    before = judge.signals.loss.median
    apply_rewind(judge, source, judged(judge, dies(source)))
    (good,) = of(Outcome, judged(judge, source.rows(40)))
    assert good.action is Action.REWIND
    assert good.values["before"] == pytest.approx(before)
    assert good.values["updates"] == Policy().healthy_steps_to_confirm
    assert good.values["loss"] == pytest.approx(before, rel=0.2)
    assert "it helped" in good.detail
    apply_rewind(judge, source, judged(judge, dies(source)))
    judged(judge, source.rows(3))
    (bad,) = of(Outcome, judged(judge, dies(source)))
    assert not bad.helped
    assert bad.values["updates"] == 3


def test_outcome_is_judged_by_the_losses_after_it() -> None:
    judge, source = trained()
    first = apply_rewind(judge, source, judged(judge, dies(source)))
    (outcome,) = of(Outcome, judged(judge, source.rows(40, times=1.6)))
    assert not outcome.helped
    assert outcome.values["loss"] > 1.3 * outcome.values["before"]
    judged(judge, source.rows(20))
    second = apply_rewind(judge, source, judged(judge, dies(source)))
    assert second.remedy != first.remedy, "a remedy that did not help is not tried again"
    judged(judge, source.rows(60, times=1.6))
    judged(judge, source.rows(Policy().relax_after + 40))
    assert apply_rewind(judge, source, judged(judge, dies(source))).remedy == first.remedy, "until there was progress"


def overflows(source: Source, scale: float = 1024.0) -> StepMetrics:
    return source.nan(loss=math.inf, loss_scale=scale)


def occasional_overflows(source: Source, scale: float = 1024.0) -> list[StepMetrics]:
    """Losses that overflow float16 among others that do not."""
    sound = [source.rows(2, loss_scale=scale) for _ in range(REPEAT_COUNT)]
    return [row for rows in sound for row in (*rows, overflows(source, scale))]


def test_occasional_float16_overflows_switch_to_float32_without_a_rewind() -> None:
    judge, source = trained(source=Source(1, loss_scale=1024.0))
    decision = of(Decision, judged(judge, occasional_overflows(source)))[-1]
    assert decision.action is Action.CONSTRAIN
    assert overrides_of(decision).float32
    assert not overrides_of(decision).max_lr, "the dtype alone is to blame"
    (outcome,) = of(Outcome, judged(judge, source.rows(40)))
    assert outcome.helped


def test_infinite_losses_in_other_dtypes_are_only_refused() -> None:
    judge, source = trained()
    assert actions(judged(judge, occasional_overflows(source, math.nan))) == []


def test_rewind_in_float32_follows_when_float32_alone_does_not_help() -> None:
    judge, source = trained(source=Source(1, loss_scale=1024.0))
    judged(judge, [overflows(source) for _ in range(3)])
    events = judged(judge, [*source.rows(5), *(overflows(source) for _ in range(3))])
    assert [o.helped for o in of(Outcome, events)] == [False]
    assert overrides_of(apply_rewind(judge, source, events)).float32


def test_updates_from_before_float32_do_not_count_against_it() -> None:
    judge, source = trained(source=Source(1, loss_scale=1024.0))
    events = judged(judge, [overflows(source) for _ in range(3 + 4)])
    assert actions(events) == [Action.CONSTRAIN]
    (outcome,) = of(Outcome, judged(judge, source.rows(40)))
    assert outcome.helped


def test_signs_from_before_a_remedy_do_not_count_against_it() -> None:
    """The overflows are over, but the loss scale is low; it is reset; rows already measured still have it."""
    judge, source = trained(source=Source(1, loss_scale=2.0**16))
    events = judged(judge, [overflows(source) for _ in range(3 + 4)])
    events += judged(judge, source.rows(6, loss_scale=2.0**4))
    assert actions(events) == [Action.CONSTRAIN] * 2
    assert of(Decision, events)[-1].loss_scale == 2.0**16
    assert actions(judged(judge, source.rows(40))) == []


def test_newest_snapshot_is_used_if_no_update_was_applied_since_the_onset() -> None:
    judge, source = trained()
    first = apply_rewind(judge, source, judged(judge, dies(source)))
    assert (first.max_attempt, first.onset_known) == (150, True)
    judged(judge, source.rows(5))
    second = apply_rewind(judge, source, judged(judge, dies(source)))
    assert not second.onset_known, "the first rewind did not help: only a confirmed snapshot is used now"


def test_onset_is_not_taken_as_known_if_the_loss_rose() -> None:
    judge, source = trained()
    decision = apply_rewind(judge, source, judged(judge, [source.row(lr=4e-2, times=1.25**k) for k in range(1, 6)]))
    assert not decision.onset_known


def test_new_kind_of_incident_starts_with_an_untried_remedy() -> None:
    judge, source = trained(source=Source(1, loss_scale=1024.0))
    tried = [of(Decision, judged(judge, [overflows(source) for _ in range(3)]))[-1].remedy]
    events = judged(judge, [*source.rows(5), *dies(source)])
    tried.append(apply_rewind(judge, source, events).remedy)
    events = judged(judge, [*source.rows(5), *(overflows(source) for _ in range(3))])
    tried.append(apply_rewind(judge, source, events).remedy)
    assert len(set(tried)) == 3


def test_number_of_actions_is_limited() -> None:
    judge, source = trained(Policy(max_actions=2))
    for _ in range(2):
        apply_rewind(judge, source, judged(judge, dies(source)))
        judged(judge, source.rows(40))
    events = judged(judge, dies(source))
    assert actions(events) == [Action.STOP]
    assert "the limit of 2 actions is reached" in of(Decision, events)[-1].reason


def relaxed(events: list[Event]) -> list[StepOverrides]:
    return [overrides_of(d) for d in of(Decision, events) if d.action is Action.RELAX]


def test_unneeded_overrides_are_lifted() -> None:
    judge, source = trained()
    overrides = overrides_of(apply_rewind(judge, source, judged(judge, dies(source))))
    assert overrides.max_lr
    assert overrides.norm_ceiling
    assert judged(judge, source.rows(95)) != []
    events = judged(judge, source.rows(10))
    assert relaxed(events) == [StepOverrides()]
    (decision,) = of(Decision, events)
    assert decision.reason.startswith("100 healthy updates")
    assert actions(judged(judge, source.rows(600))) == [], "there is nothing more to lift"


def test_needed_cap_is_widened_gradually() -> None:
    judge, source = trained()
    rising = [source.row(lr=4e-2, times=1.25**k) for k in range(1, 6)]
    overrides = overrides_of(apply_rewind(judge, source, judged(judge, rising)))
    assert overrides.max_lr == (1e-3,)
    looser = relaxed(judged(judge, source.rows(250, lr=4e-3)))
    caps = [r.max_lr[0] for r in looser]
    assert len(caps) > 1
    assert caps == pytest.approx([1e-3 * 1.5 ** (k + 1) for k in range(len(caps))])
    assert all(not r.norm_ceiling for r in looser), "the ceilings refused nothing and are lifted"


def test_cap_is_not_widened_while_the_loop_sets_the_harmful_value() -> None:
    judge, source = trained()
    rising = [source.row(lr=4e-2, times=1.25**k) for k in range(1, 6)]
    overrides = overrides_of(apply_rewind(judge, source, judged(judge, rising)))
    looser = relaxed(judged(judge, source.rows(800, lr=4e-2)))
    assert looser, "the other overrides are lifted"
    assert {r.max_lr for r in looser} == {overrides.max_lr}


def test_wrong_momentum_stays_capped() -> None:
    judge, source = trained()
    apply_rewind(judge, source, judged(judge, source.rows(1, momentum=1.02)))
    (looser,) = relaxed(judged(judge, source.rows(250, momentum=1.02)))
    assert looser.max_momentum == (0.9,)
    assert looser.max_lr == ()


def test_ceilings_that_refused_an_update_are_kept() -> None:
    judge, source = trained()
    overrides = overrides_of(apply_rewind(judge, source, judged(judge, dies(source))))
    rows = [*source.rows(30), source.far(norm=30.0, norm_limit=6.0), *source.rows(130)]
    (looser,) = relaxed(judged(judge, rows))
    assert looser.norm_ceiling == overrides.norm_ceiling
    assert looser.loss_ceiling == overrides.loss_ceiling
    assert looser.max_lr == ()


def test_ceilings_that_refused_nothing_are_lifted() -> None:
    judge, source = trained()
    apply_rewind(judge, source, judged(judge, dies(source)))
    assert relaxed(judged(judge, [*source.rows(30), source.nan(), *source.rows(130)])) == [StepOverrides()]


def test_cap_survives_the_next_incident() -> None:
    """Rows contain the lr that the loop set, not the capped one."""
    judge, source = trained()
    apply_rewind(judge, source, judged(judge, [source.row(lr=4e-2, times=1.25**k) for k in range(1, 6)]))
    judged(judge, source.rows(80, lr=4e-2))
    again = overrides_of(apply_rewind(judge, source, judged(judge, [source.nan(lr=4e-2) for _ in range(3)])))
    assert again.max_lr == (1e-3,)


def test_failed_action_is_not_counted_as_in_force() -> None:
    judge, source = trained()
    events = judged(judge, dies(source))
    judge.failed(of(Decision, events)[-1], "no snapshots are kept")
    assert actions(judged(judge, source.rows(300))) == [], "there is nothing to lift"
    (again,) = [d for d in of(Decision, judged(judge, dies(source))) if d.action is Action.REWIND]
    assert again.remedy != of(Decision, events)[-1].remedy, "the next remedy"


def test_signs_that_persist_after_a_rewind_become_the_baseline() -> None:
    judge, source = trained()
    assert overrides_of(apply_rewind(judge, source, judged(judge, dies(source)))).norm_ceiling
    judged(judge, source.rows(3))
    events = judged(judge, [source.far(norm=30.0, norm_limit=6.0) for _ in range(6)])
    assert actions(events) == [Action.ACCEPT]
    accepted = overrides_of(of(Decision, events)[-1])
    assert accepted.norm_ceiling == ()
    assert accepted.max_lr, "only the ceilings were wrong"
    after = judged(judge, source.rows(150, norm=30.0))
    assert Action.REWIND not in actions(after)
    assert Action.STOP not in actions(after)


def test_persisting_signs_without_a_rewind_do_not_become_the_baseline() -> None:
    judge, source = trained()
    assert actions(judged(judge, [source.far() for _ in range(6)])) == [Action.REWIND]


def test_observe_decides_each_incident_once_without_acting() -> None:
    judge, source = trained(Policy(observe=True))
    first = judged(judge, [*[source.nan() for _ in range(15)], *source.rows(150)])
    second = judged(judge, [*[source.nan() for _ in range(15)], *source.rows(150)])
    rising = judged(judge, [source.row(lr=4e-2, times=1.2**k) for k in range(1, 20)])
    for events in (first, second, rising):
        assert actions(events) == [Action.REWIND]
        assert not any(d.applied for d in of(Decision, events))
        assert of(Outcome, events) == [], "no action, no outcome"


def test_observe_never_decides_twice_in_a_row() -> None:
    judge, source = trained(Policy(observe=True))
    attempts = [d.attempt for row in source.rows(300, times=9.0) for d in of(Decision, judge.update(row))]
    assert len(attempts) == 1


def test_snapshot_is_confirmed_by_later_healthy_updates() -> None:
    judge, source = Judge(Policy(healthy_steps_to_trust=10)), Source(1)
    assert judge.proven == -1
    judged(judge, source.rows(100))
    assert judge.proven == 89
    assert judge.quiet
    judged(judge, [source.nan()])
    assert not judge.quiet
    judged(judge, source.rows(30))
    assert judge.proven == 89, "nothing is confirmed during an incident"
    assert not judge.quiet, "and no snapshot is taken"
    judged(judge, source.rows(60))
    assert judge.quiet
    assert judge.proven == source.attempt - 1 - 10


def test_rewind_withdraws_later_confirmations() -> None:
    judge, source = trained(rows=150)
    assert judge.proven == 139
    judged(judge, dies(source))
    judge.rewound(120, 120)
    assert judge.proven == 120
    assert not judge.quiet, "no update has been applied yet"
    judged(judge, source.rows(1))
    assert judge.quiet


def test_slow_step_or_leak_opens_no_incident() -> None:
    judge, source = trained()
    rows = [source.row(seconds=0.1) for _ in range(60)] + [source.row(seconds=2.0) for _ in range(20)]
    assert [f.detector for f in of(Finding, judged(judge, rows))] == ["slow_steps"]
    assert judge.quiet

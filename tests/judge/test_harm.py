"""What held-out data tells of harm, what is waited out, and what is put right without going back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from made_rows import NAMES, Bench, Source, actions, judged, layers, of, trained

from surefoot.judge.detectors.weights import FrozenWeights
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.records import Action, Cause, Decision, Event, Finding, Outcome, StepMetrics, Verdict


def evaluated(source: Source, loss: float, **values: float) -> StepMetrics:
    return source.row(eval_loss=loss, **values)


def decided(events: list[Event]) -> Decision:
    (decision,) = [d for d in of(Decision, events) if d.action is not Action.REFUSE]
    return decision


def harmed(source: Source, *, after: float = 2.9) -> list[StepMetrics]:
    """Garbage for a while: the loss leaps and stays, and held-out data is told of before and after."""
    rows = [evaluated(source, 2.0), *source.rows(20, times=1.5), evaluated(source, 2.8, times=1.5)]
    return [*rows, *source.rows(20, times=1.5), evaluated(source, after, times=1.5)]


def test_training_that_left_its_course_and_ruins_the_held_out_loss_is_undone() -> None:
    judge, source = trained()
    well = source.attempt
    decision = decided(judged(judge, harmed(source)))
    assert decision.action is Action.REWIND
    assert "the eval loss is 2.9 and was 2" in decision.reason
    assert decision.max_attempt <= well + 1, "all that was learnt since is left behind"
    asked = decision.overrides
    assert asked is not None
    assert math.isfinite(asked.loss_ceiling)
    assert asked.norm_ceiling


@pytest.mark.parametrize("after", [2.0, 2.4, 2.7])
def test_harm_that_heals_is_left_alone(after: float) -> None:
    judge, source = trained()
    assert actions(judged(judge, harmed(source, after=after))) == []


@pytest.mark.parametrize(("last", "done"), [(2.7, []), (3.0, [Action.REWIND])])
def test_what_heals_is_left_alone_though_not_each_look_is_better_than_the_one_before(
    last: float, done: list[Action]
) -> None:
    judge, source = trained()
    rows = [evaluated(source, 2.0)]
    for loss in (2.9, 2.6, last):
        rows += [*source.rows(20, times=1.5), evaluated(source, loss, times=1.5)]
    assert actions(judged(judge, rows)) == done


@pytest.mark.parametrize(
    ("first", "after", "done"),
    [(4.0, (2.5, 2.6), []), (4.0, (3.2, 3.3), [Action.REWIND]), (2.5, (2.6, 2.7), [Action.REWIND]), (2.5, (3.4,), [])],
)
def test_a_level_that_only_crept_up_is_believed_where_the_harm_is_great_and_lasts(
    first: float, after: Sequence[float], done: list[Action]
) -> None:
    """As of batches that are harder on purpose, which help in the end; it is great when all is lost that was learnt."""
    judge, source = trained(source=Source(1, noise=0.12))
    rows = [evaluated(source, first), *source.rows(20), evaluated(source, 2.0)]
    for loss in after:
        rows += [*source.rows(24, times=1.5), evaluated(source, loss, times=1.5)]
    events = judged(judge, rows)
    assert {"loss_level", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == done


@pytest.mark.parametrize(
    ("then", "after", "done"),
    [(1.6, (2.5, 2.55), [Action.REWIND]), (1.25, (2.5, 2.55), []), (1.25, (3.2, 3.3), [Action.REWIND])],
)
def test_harder_batches_that_the_model_learns_are_believed_to_do_harm_where_that_is_great(
    then: float, after: Sequence[float], done: list[Action]
) -> None:
    """As when augmentation begins: held-out data, which is as before, is worse for a while, and never far worse."""
    judge, source = trained(source=Source(1, loss=2.0, floor=2.0, noise=0.12))
    rows = [evaluated(source, 4.0), *source.rows(20), evaluated(source, 2.0), *source.rows(8, times=1.6)]
    for loss in after:
        rows += [*source.rows(20, times=then), evaluated(source, loss, times=then)]
    events = judged(judge, rows)
    assert {"loss_level", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == done


def test_a_batch_that_was_made_smaller_explains_it_and_the_way_back_would_not_help() -> None:
    for samples, harm in ((64.0, True), (32.0, False)):
        judge, source = trained(source=Source(1, samples=64.0))
        rows = [evaluated(source, 2.0), *source.rows(20, times=1.5, samples=samples)]
        rows += [evaluated(source, 2.8, times=1.5, samples=samples), *source.rows(20, times=1.5, samples=samples)]
        rows += [evaluated(source, 2.9, times=1.5, samples=samples)]
        assert actions(judged(judge, rows)) == [Action.REWIND] * harm


def test_smaller_batches_explain_it_also_after_one_good_evaluation() -> None:
    judge, source = trained(source=Source(1, samples=64.0))
    small = {"times": 1.5, "samples": 16.0}
    rows = [evaluated(source, 2.0), *source.rows(4, **small), evaluated(source, 2.05, **small)]
    for loss in (2.6, 2.7):
        rows += [*source.rows(20, **small), evaluated(source, loss, **small)]
    assert actions(judged(judge, rows)) == []


@pytest.mark.parametrize(
    ("leaps", "times", "after", "said"),
    [(True, 1.4, 2.9, True), (False, 1.4, 2.9, False), (True, 1.0, 2.9, False), (True, 1.4, 9.0, False)],
)
def test_one_look_at_held_out_data_is_enough_after_a_leap_that_has_not_healed(
    leaps: bool, times: float, after: float, said: bool
) -> None:
    """If it is the same harm: where training suffers far less, it is another matter."""
    judge, source = trained()
    high = 6.0 if leaps else times
    rows = [evaluated(source, 2.0), source.row(times=high, swells=high), *source.rows(20, times=times)]
    events = judged(judge, [*rows, evaluated(source, after, times=times), *source.rows(8, times=times)])
    assert actions(events) == [Action.REWIND] * said


@pytest.mark.parametrize(("first", "after", "said"), [(2.6, 2.7, True), (3.5, 2.7, False), (2.2, 2.3, False)])
def test_one_look_is_enough_when_all_is_lost_that_was_learnt(first: float, after: float, said: bool) -> None:
    """No leap, and less far above the best: where the floor is high, a share of the loss says little."""
    judge, source = trained(rows=0, source=Source(0, half=40.0))
    judged(judge, [*source.rows(24), evaluated(source, first), *source.rows(150), evaluated(source, 2.0)])
    events = judged(judge, [*source.rows(20, times=1.4), evaluated(source, after, times=1.4)])
    assert actions([*events, *judged(judge, source.rows(8, times=1.4))]) == [Action.REWIND] * said


@pytest.mark.parametrize(("level", "said"), [(2.0, True), (0.002, False)])
def test_a_rise_from_next_to_nothing_to_a_little_more_is_no_sign_of_harm(level: float, said: bool) -> None:
    """The loss began with 3 and has come down to this; held-out data is harder than what is trained on."""
    source = Source(1, loss=level, floor=level)
    judge = Judge(Policy())
    judged(judge, [*source.rows(5, loss=3.0), *source.rows(200)])
    rows = [evaluated(source, 2.0), *source.rows(20, times=1.5), evaluated(source, 2.8, times=1.5)]
    events = judged(judge, [*rows, *source.rows(20, times=1.5), evaluated(source, 2.9, times=1.5)])
    assert any(f.detector == "loss_level" for f in of(Finding, events))
    assert actions(events) == [Action.REWIND] * said


@pytest.mark.parametrize(("falls", "done"), [(0.93, []), (1.0, [Action.REWIND])])
def test_gradients_that_grow_with_a_rate_are_no_harm_while_the_loss_falls(falls: float, done: list[Action]) -> None:
    judge, source = trained(source=Source(1, loss=3.0, floor=3.0, noise=0.01, scatter=0.02, lr=1e-6))
    rows = [source.row(lr=1e-3, times=falls ** min(k, 9), swells=1.4 ** min(k, 9)) for k in range(14)]
    events = judged(judge, rows)
    assert {"hyperparam_change", "growth"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == done


def test_a_model_that_only_overfits_is_left_alone() -> None:
    judge, source = trained()
    worse = [row for k in range(10) for row in (*source.rows(24), evaluated(source, 2.0 + 0.3 * k))]
    assert actions(judged(judge, worse)) == []


def test_held_out_losses_of_several_processes_may_differ_and_are_no_reason_to_act() -> None:
    judge, source = trained(alone=False)
    assert actions(judged(judge, harmed(source))) == []


def waiting() -> tuple[Source, list[Event], Decision]:
    judge, source = trained()
    decision = decided(judged(judge, harmed(source)))
    judge.rewound(decision.max_attempt - 1, decision.max_attempt - 1)
    events = judged(judge, [source.row(times=1.6, verdict=Verdict.NORM_OUTLIER, norm_limit=9.0) for _ in range(120)])
    events += judged(judge, source.rows(40))
    return source, events, decision


def test_batches_that_did_harm_are_waited_out_and_the_run_goes_on() -> None:
    _, events, _ = waiting()
    assert actions(events) == [], "120 refusals in a row stop no run that waits on purpose"
    (outcome,) = of(Outcome, events)
    assert outcome.helped


def test_no_run_waits_for_ever() -> None:
    judge, source = trained(Policy(max_vetoes_waiting=50))
    decision = decided(judged(judge, harmed(source)))
    judge.rewound(decision.max_attempt - 1, decision.max_attempt - 1)
    events = judged(judge, [source.row(times=1.6, verdict=Verdict.NORM_OUTLIER, norm_limit=9.0) for _ in range(50)])
    stop = decided(events)
    assert stop.action is Action.STOP
    assert "made the eval loss worse" in stop.reason


def test_a_loss_scale_that_fell_too_low_is_set_back_without_losing_a_step() -> None:
    judge, source = trained(source=Source(1, loss_scale=32768.0))
    rows = [source.row(loss_scale=2.0**-k, verdict=Verdict.OVERFLOW, norm=math.nan) for k in range(12)]
    events = judged(judge, [*rows, *source.rows(3, loss_scale=2.0**-12, norm=0.0)])
    decision = decided(events)
    assert (decision.action, decision.loss_scale) == (Action.CONSTRAIN, 32768.0)
    (outcome,) = of(Outcome, judged(judge, source.rows(40)))
    assert outcome.helped


def test_a_loss_scale_that_falls_again_is_answered_by_going_back() -> None:
    judge, source = trained(source=Source(1, loss_scale=32768.0))
    judged(judge, source.rows(3, loss_scale=2.0**-12))
    assert actions(judged(judge, source.rows(8, loss_scale=2.0**-12))) == [Action.REWIND]


def creeping(source: Source, rows: int, times: float = 1.0) -> list[StepMetrics]:
    """The rate creeps up to eight times what it was."""
    return [source.row(lr=min(1.1 ** (1 + k), 8.0) * 1e-3, times=times) for k in range(rows)]


def test_a_rate_that_crept_up_in_vain_is_held_and_what_was_learnt_is_kept() -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    decision = decided(judged(judge, creeping(source, 60, times=1.03)))
    assert decision.action is Action.CONSTRAIN
    assert decision.overrides is not None
    assert decision.overrides.max_lr == pytest.approx((1e-3,))


@pytest.mark.parametrize(("times", "done"), [(1.04, [Action.CONSTRAIN]), (1.0, [])])
def test_a_raised_momentum_under_which_the_loss_is_rather_higher_is_held(times: float, done: list[Action]) -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    events = judged(judge, source.rows(50, momentum=0.99, times=times))
    assert "hyperparam_change" in {f.detector for f in of(Finding, events)}
    assert actions(events) == done
    for decision in of(Decision, events):
        assert decision.cause is Cause.MOMENTUM
        assert decision.overrides is not None
        assert decision.overrides.max_momentum == pytest.approx((0.9,))


def test_a_rate_that_leapt_up_in_vain_is_answered_by_going_back_to_right_before_it() -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    decision = decided(judged(judge, source.rows(40, lr=8e-3, times=1.03)))
    assert decision.action is Action.REWIND
    assert decision.max_attempt == 400
    assert decision.overrides is not None
    assert decision.overrides.max_lr == pytest.approx((1e-3,))


def test_a_held_rate_that_does_not_help_is_answered_by_going_back() -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    events = judged(judge, [*creeping(source, 60, times=1.03), *source.rows(12, lr=8e-3, times=2.5)])
    assert actions(events) == [Action.CONSTRAIN, Action.REWIND]


def test_a_raised_rate_that_held_out_data_speaks_against_is_taken_back_at_once() -> None:
    """The loss in training shows nothing, and a little above the best is enough; without the rate it is not."""
    for lr, done in ((8e-3, [Action.REWIND]), (1e-3, [])):
        judge, source = trained(rows=0, source=Source(1, half=30.0))
        rows = [*source.rows(400), evaluated(source, 2.0, lr=lr), *source.rows(10, lr=lr)]
        events = judged(judge, [*rows, evaluated(source, 2.2, lr=lr), *source.rows(10, lr=lr)])
        assert actions(events) == done
    assert "eval_regression" not in {f.detector for f in of(Finding, events)}


def test_a_raised_rate_is_blamed_once_until_all_is_well_again() -> None:
    """The state gone back to may be no better on held-out data yet, while the loop goes on asking for the rate."""
    judge, source = trained(rows=0, source=Source(1, half=30.0))
    rows = [*source.rows(400), evaluated(source, 2.0, lr=8e-3), *source.rows(10, lr=8e-3)]
    decision = decided(judged(judge, [*rows, evaluated(source, 2.2, lr=8e-3)]))
    judge.rewound(decision.max_attempt - 1, decision.max_attempt - 1)
    for _ in range(4):
        assert actions(judged(judge, [*source.rows(24, lr=8e-3), evaluated(source, 2.2, lr=8e-3)])) == []


@pytest.mark.parametrize(("lr", "done"), [(1e-3, [Action.REWIND]), (4e-3, [])])
def test_a_schedule_that_starts_again_explains_why_held_out_data_gets_worse(lr: float, done: list[Action]) -> None:
    judge, source = trained(rows=0)
    judged(judge, [*source.rows(150), evaluated(source, 2.0), *source.rows(10, lr=lr, times=1.5)])
    late = [evaluated(source, 2.8, lr=lr), *source.rows(20, lr=lr), evaluated(source, 2.9, lr=lr)]
    assert actions(judged(judge, late)) == done


def test_a_rate_that_comes_and_goes_is_no_harm_when_held_out_data_is_a_little_worse() -> None:
    """As with a cyclic rate: the loss in training is higher too, while the rate is."""
    judge, source = trained()
    low = [*source.rows(4, lr=1e-4), evaluated(source, 2.0, lr=1e-4)]
    events = judged(judge, [*low, *source.rows(12, times=1.5), evaluated(source, 2.2), *source.rows(10)])
    assert {"loss_level", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == []


def test_a_held_rate_that_has_done_harm_already_is_answered_by_going_back() -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    rows = [evaluated(source, 2.0), *creeping(source, 50, times=1.03)]
    events = judged(judge, [*rows, evaluated(source, 2.2)])
    assert actions(events) == [Action.CONSTRAIN, Action.REWIND]
    rewind = of(Decision, events)[-1]
    assert rewind.max_attempt <= 400
    assert rewind.overrides is not None
    assert rewind.overrides.max_lr == pytest.approx((1e-3,))


def test_a_held_rate_that_has_done_harm_is_answered_by_going_back_also_when_that_is_told_right_away() -> None:
    """Updates from before the answer came into force tell nothing about it, but what they did to the weights stands."""
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    judged(judge, [evaluated(source, 2.0), *creeping(source, 30, times=1.03)])
    while not actions(judged(judge, [source.row(lr=8e-3, times=1.03)])):
        assert source.attempt < 480
    events = judged(judge, [source.row(lr=8e-3), evaluated(source, 2.2, lr=8e-3), *source.rows(10, lr=8e-3)])
    assert actions(events) == [Action.REWIND]


@pytest.mark.parametrize(
    ("well", "lr", "done"),
    [(110, 12e-3, [Action.REWIND]), (110, 6e-3, []), (300, 12e-3, [])],
    ids=["climbs on", "stays", "is usual by then"],
)
def test_a_raised_rate_that_went_well_is_blamed_for_what_comes_when_it_climbs_on(
    well: int, lr: float, done: list[Action]
) -> None:
    judge, source = trained(rows=150)
    went_well = judged(judge, [*source.rows(40, lr=4e-3, times=0.9), *source.rows(well, lr=6e-3, times=0.9)])
    assert "hyperparam_change" in {f.detector for f in of(Finding, went_well)}
    assert actions(went_well) == []
    resumed = Judge(Policy())
    resumed.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    events = judged(resumed, [*source.rows(20, lr=lr, times=0.9), *source.rows(12, lr=lr, times=1.2)])
    assert "loss_level" in {f.detector for f in of(Finding, events)}
    assert actions(events) == done
    for decision in of(Decision, events):
        assert decision.overrides is not None
        assert decision.overrides.max_lr == pytest.approx((1e-3,)), "what it was before it was raised"


def test_updates_are_known_anew_after_a_rewind() -> None:
    bench, source = Bench(), Source(0)
    detector = FrozenWeights(("a", "b"), None, bench.normal, adaptive=True)
    damaged = [source.row(update_ratio=1e-3 * 1.5**k) for k in range(14)]
    assert bench.said(detector, [*source.rows(20, update_ratio=1e-3), *damaged]) == []
    detector.rewound()
    assert bench.said(detector, source.rows(60, update_ratio=1e-3)) == [], "small against the damaged ones only"


def passing(source: Source, quiet: int) -> list[StepMetrics]:
    """Garbage for a while that is long over in training when held-out data tells of the harm."""
    rows = [evaluated(source, 2.0), *source.rows(10, times=1.5), *source.rows(quiet), evaluated(source, 2.8)]
    return [*rows, *source.rows(20), evaluated(source, 2.9)]


def test_harm_that_held_out_data_tells_of_late_is_undone() -> None:
    judge, source = trained()
    well = source.attempt
    decision = decided(judged(judge, passing(source, quiet=70)))
    assert decision.action is Action.REWIND
    assert decision.max_attempt <= well + 1


def test_harm_from_before_all_states_that_are_kept_is_told_and_no_more() -> None:
    judge, source = trained(Policy(snapshot_reach=60))
    events = judged(judge, passing(source, quiet=70))
    assert "eval_regression" in {f.detector for f in of(Finding, events)}
    assert actions(events) == []


def test_what_gets_worse_little_by_little_is_no_harm_whatever_else_happens() -> None:
    judge, source = trained()
    worse = [row for k in range(10) for row in (*source.rows(24), evaluated(source, 2.0 * 1.05**k))]
    bump = [*source.rows(10, times=1.5), *source.rows(20)]
    assert actions(judged(judge, [*worse, *bump, evaluated(source, 3.4)])) == []


@pytest.mark.parametrize(("widest", "done"), [(25.0, []), (400.0, [Action.REWIND])])
def test_a_swing_far_smaller_than_the_harm_on_held_out_data_is_not_its_reason(
    widest: float, done: list[Action]
) -> None:
    """As when a model has learnt its samples by heart: the loss is next to nothing, and so is what it swings by."""
    judge, source = trained(rows=0, source=Source(1, loss=2.0, floor=0.002, half=8.0))
    judged(judge, [*source.rows(200), evaluated(source, 1.3), *source.rows(10)])
    swings = [source.row(times=max(widest * k / 12, 1.0) if k % 2 else 1.0) for k in range(14)]
    events = judged(judge, [*swings, evaluated(source, 1.6), *source.rows(20), evaluated(source, 1.62)])
    assert {"oscillation", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == done


@pytest.mark.parametrize(("times", "done"), [(1.0, []), (2.5, [Action.REWIND])])
def test_gradients_that_grow_while_the_loss_feels_nothing_are_not_the_reason(times: float, done: list[Action]) -> None:
    judge, source = trained(rows=0, source=Source(1, loss=2.0, floor=0.002, half=8.0))
    judged(judge, [*source.rows(200), evaluated(source, 1.3), *source.rows(10)])
    grows = [source.row(times=times**k, swells=1.2**k, norm=0.6 * 1.3**k) for k in range(8)]
    events = judged(judge, [*grows, evaluated(source, 1.6), *source.rows(20), evaluated(source, 1.62)])
    assert {"growth", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == done


@pytest.mark.parametrize(("swells", "times", "done"), [(6.0, 30.0, False), (40.0, 30.0, True), (6.0, 200.0, True)])
def test_a_leap_far_smaller_than_the_harm_is_its_reason_only_if_the_update_was_of_another_kind(
    swells: float, times: float, done: bool
) -> None:
    """The loss is 0.002, so that one thirty times as high is still next to nothing."""
    judge, source = trained(rows=0, source=Source(1, loss=2.0, floor=0.002, half=8.0))
    judged(judge, [*source.rows(200), evaluated(source, 1.3), *source.rows(10)])
    leap = source.row(times=times, swells=swells)
    events = judged(judge, [leap, *source.rows(9), evaluated(source, 1.6), *source.rows(20), evaluated(source, 1.62)])
    assert {"jump", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert bool(actions(events)) == done


def test_a_single_leap_is_no_reason_to_take_a_rate_back_by_which_a_run_learns_at_last() -> None:
    judge, source = trained(source=Source(1, floor=3.0, lr=1e-6))
    learns = [source.row(lr=1e-3, times=0.98**k) for k in range(20)]
    leaps = [source.row(lr=1e-3, times=0.6, swells=1.3**k, norm=1.3**k) for k in range(6)]
    spike = source.row(lr=1e-3, times=1.2, norm=12.0)
    events = judged(judge, [*learns, *leaps, spike, *source.rows(30, lr=1e-3, times=0.5)])
    assert {"hyperparam_change", "growth"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == []


def test_a_batch_of_another_kind_that_ruins_the_held_out_loss_alone_is_undone() -> None:
    usual = {"input_mean": 0.0, "input_std": 1.0, "input_absmax": 3.0}
    judge, source = trained(source=Source(1, **usual))
    well = source.attempt
    rows = [evaluated(source, 2.0), source.row(input_std=1e5, input_absmax=3e5), *source.rows(20)]
    decision = decided(judged(judge, [*rows, evaluated(source, 3.0), *source.rows(20), evaluated(source, 3.0)]))
    assert decision.action is Action.REWIND
    assert decision.max_attempt <= well + 1


@pytest.mark.parametrize(("after", "done"), [(1.6, [Action.REWIND]), (1.0, [])])
def test_a_huge_update_that_landed_is_undone_if_the_loss_has_risen_since(after: float, done: list[Action]) -> None:
    judge, source = trained()
    assert actions(judged(judge, [source.row(swells=300.0), *source.rows(12, times=after)])) == done


def test_a_huge_update_that_was_refused_is_no_reason_for_what_comes_later() -> None:
    judge, source = trained()
    refused = source.row(swells=300.0, verdict=Verdict.NORM_OUTLIER, norm_limit=100.0)
    assert actions(judged(judge, [refused, *source.rows(12, times=1.6)])) == []


@pytest.mark.parametrize(("silent", "done"), [((0,), [Action.REWIND]), ((), [])])
def test_a_slow_rise_is_believed_where_part_of_the_model_has_fallen_silent(
    silent: Sequence[int], done: list[Action]
) -> None:
    judge, source = Judge(Policy(), NAMES), Source(3, half=60.0, noise=0.1)
    judged(judge, source.rows(320), (layers(k) for k in range(320)))
    tensors = [layers(k, which=silent, zeros=0.9 if silent else 0.02) for k in range(110)]
    events = judged(judge, source.rows(110, times=1.15), tensors)
    assert any(f.evidence.get("slowly") for f in of(Finding, events) if f.detector == "loss_level")
    assert actions(events) == done


@pytest.mark.parametrize(("often", "done"), [(1, []), (6, [Action.REWIND])])
def test_a_few_high_losses_are_chance_also_where_part_of_the_model_has_fallen_silent(
    often: int, done: list[Action]
) -> None:
    judge, source = Judge(Policy(), NAMES), Source(3, loss=2.0, floor=2.0)
    judged(judge, source.rows(200), (layers(k) for k in range(200)))
    judged(judge, source.rows(30), (layers(k, zeros=0.9) for k in range(30)))
    rows = [
        source.row(loss=5.0),
        *source.rows(6, loss=1.98),
        *source.rows(3 * often, loss=2.2),
        *source.rows(7, loss=1.98),
    ]
    events = judged(judge, rows, [layers(k, zeros=0.9) for k in range(len(rows))])
    assert any(f.detector == "loss_level" for f in of(Finding, events))
    assert actions(events) == done


@pytest.mark.parametrize(("lr", "done"), [(2e-4, []), (1e-3, [Action.REWIND])])
def test_a_loss_that_counts_more_at_a_rate_lowered_to_match_is_meant(lr: float, done: list[Action]) -> None:
    judge, source = trained(source=Source(1, loss=2.0, floor=2.0), adaptive=False)
    assert actions(judged(judge, source.rows(20, times=5.0, swells=5.0, lr=lr))) == done


def test_a_rate_that_was_lowered_by_surefoot_itself_explains_no_loss_that_is_high_again() -> None:
    judge, source = trained(source=Source(1, loss=2.0, floor=2.0), adaptive=False)
    for _ in range(3):
        decision = decided(judged(judge, source.rows(20, times=5.0)))
        judge.rewound(decision.max_attempt - 1, source.step - 20)
        judged(judge, source.rows(4))
    assert "a quarter of the learning rate" in decision.remedy
    assert decided(judged(judge, source.rows(20, times=5.0))).action is Action.STOP


@pytest.mark.parametrize(("times", "done"), [(1.25, [Action.REWIND]), (1.05, [])])
def test_an_update_too_large_for_its_rate_needs_no_great_rise_to_be_undone(times: float, done: list[Action]) -> None:
    judge, source = trained(rows=0, values=10_000)
    weights = {"weight_norm": 10.0, "nonfinite_params": 0.0}
    judged(judge, [source.row(**({"update_ratio": 1e-3} | weights if k % 10 == 0 else {})) for k in range(150)])
    events = judged(judge, [source.row(update_ratio=0.1, **weights), *source.rows(20, times=times)])
    assert actions(events) == done


@pytest.mark.parametrize(("apart", "first"), [(1.0, 1.0), (3.0, 1.0), (10.0, 10.0), (30.0, 10.0)])
def test_steps_as_large_as_the_first_of_a_new_optimizer_are_no_damage(apart: float, first: float) -> None:
    """Ten times as large as usual at the same rate, and the loss rises: unless each weight moves by about as many rates
    as with the first step of its optimizer."""
    judge, source = trained(rows=0, values=10_000, first=first)
    weights = {"weight_norm": 10.0, "nonfinite_params": 0.0}
    large = apart * 1e-3 * math.sqrt(10_000) / 10.0
    usual = {"update_ratio": large / 10.0} | weights
    judged(judge, [source.row(**(usual if k % 10 == 0 else {})) for k in range(150)])
    events = judged(judge, [source.row(update_ratio=large, **weights), *source.rows(20, times=1.6)])
    assert actions(events) == ([] if apart <= first else [Action.REWIND])

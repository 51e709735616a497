"""Harm seen in eval losses: when a run is rewound, when harm is waited out, and when a cap is enough."""

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


def harmful_batches(source: Source, *, after: float = 2.9) -> list[StepMetrics]:
    """Bad batches for a while: the loss jumps and stays, with an evaluation before, during and after."""
    rows = [evaluated(source, 2.0), *source.rows(20, times=1.5), evaluated(source, 2.8, times=1.5)]
    return [*rows, *source.rows(20, times=1.5), evaluated(source, after, times=1.5)]


def test_divergence_that_ruins_the_eval_loss_is_rewound() -> None:
    judge, source = trained()
    healthy_until = source.attempt
    decision = decided(judged(judge, harmful_batches(source)))
    assert decision.action is Action.REWIND
    assert "the eval loss is 2.9 and was 2" in decision.reason
    assert decision.max_attempt <= healthy_until + 1, "updates since the last good evaluation are undone"
    overrides = decision.overrides
    assert overrides is not None
    assert math.isfinite(overrides.loss_ceiling)
    assert overrides.norm_ceiling


@pytest.mark.parametrize("after", [2.0, 2.4, 2.7])
def test_recovering_eval_loss_is_not_acted_on(after: float) -> None:
    judge, source = trained()
    assert actions(judged(judge, harmful_batches(source, after=after))) == []


@pytest.mark.parametrize(("last", "done"), [(2.7, []), (3.0, [Action.REWIND])])
def test_uneven_recovery_is_rewound_only_if_it_ends_higher(last: float, done: list[Action]) -> None:
    judge, source = trained()
    rows = [evaluated(source, 2.0)]
    for loss in (2.9, 2.6, last):
        rows += [*source.rows(20, times=1.5), evaluated(source, loss, times=1.5)]
    assert actions(judged(judge, rows)) == done


@pytest.mark.parametrize(
    ("first", "after", "done"),
    [(4.0, (2.5, 2.6), []), (4.0, (3.2, 3.3), [Action.REWIND]), (2.5, (2.6, 2.7), [Action.REWIND]), (2.5, (3.4,), [])],
)
def test_slow_rise_is_rewound_only_when_large_and_lasting(
    first: float, after: Sequence[float], done: list[Action]
) -> None:
    """As with batches made harder on purpose, which help in the end; large means that all progress is lost."""
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
def test_harder_batches_are_rewound_only_when_eval_loss_is_far_worse(
    then: float, after: Sequence[float], done: list[Action]
) -> None:
    """As when augmentation begins: the eval loss is worse for a while, but never far worse."""
    judge, source = trained(source=Source(1, loss=2.0, floor=2.0, noise=0.12))
    rows = [evaluated(source, 4.0), *source.rows(20), evaluated(source, 2.0), *source.rows(8, times=1.6)]
    for loss in after:
        rows += [*source.rows(20, times=then), evaluated(source, loss, times=then)]
    events = judged(judge, rows)
    assert {"loss_level", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == done


def test_smaller_batch_size_explains_a_higher_loss_without_a_rewind() -> None:
    for samples, harm in ((64.0, True), (32.0, False)):
        judge, source = trained(source=Source(1, samples=64.0))
        rows = [evaluated(source, 2.0), *source.rows(20, times=1.5, samples=samples)]
        rows += [evaluated(source, 2.8, times=1.5, samples=samples), *source.rows(20, times=1.5, samples=samples)]
        rows += [evaluated(source, 2.9, times=1.5, samples=samples)]
        assert actions(judged(judge, rows)) == [Action.REWIND] * harm


def test_smaller_batch_size_explains_it_also_after_a_good_evaluation() -> None:
    judge, source = trained(source=Source(1, samples=64.0))
    small = {"times": 1.5, "samples": 16.0}
    rows = [evaluated(source, 2.0), *source.rows(4, **small), evaluated(source, 2.05, **small)]
    for loss in (2.6, 2.7):
        rows += [*source.rows(20, **small), evaluated(source, loss, **small)]
    assert actions(judged(judge, rows)) == []


@pytest.mark.parametrize(
    ("has_jump", "times", "after", "rewinds"),
    [(True, 1.4, 2.9, True), (False, 1.4, 2.9, False), (True, 1.0, 2.9, False), (True, 1.4, 9.0, False)],
)
def test_one_evaluation_is_enough_after_a_jump_without_recovery(
    has_jump: bool, times: float, after: float, rewinds: bool
) -> None:
    """Only if training is harmed as much as evaluation."""
    judge, source = trained()
    high = 6.0 if has_jump else times
    rows = [evaluated(source, 2.0), source.row(times=high, swells=high), *source.rows(20, times=times)]
    events = judged(judge, [*rows, evaluated(source, after, times=times), *source.rows(8, times=times)])
    assert actions(events) == [Action.REWIND] * rewinds


@pytest.mark.parametrize(("first", "after", "rewinds"), [(2.6, 2.7, True), (3.5, 2.7, False), (2.2, 2.3, False)])
def test_one_evaluation_is_enough_when_all_progress_is_lost(first: float, after: float, rewinds: bool) -> None:
    """Without a jump, and closer to the best: with a high loss floor, a relative rise means little."""
    judge, source = trained(rows=0, source=Source(0, half=40.0))
    judged(judge, [*source.rows(24), evaluated(source, first), *source.rows(150), evaluated(source, 2.0)])
    events = judged(judge, [*source.rows(20, times=1.4), evaluated(source, after, times=1.4)])
    assert actions([*events, *judged(judge, source.rows(8, times=1.4))]) == [Action.REWIND] * rewinds


@pytest.mark.parametrize(("level", "rewinds"), [(2.0, True), (0.002, False)])
def test_rise_of_a_near_zero_loss_is_no_harm(level: float, rewinds: bool) -> None:
    """The loss started at 3 and fell to this level; the eval loss is higher than the training loss."""
    source = Source(1, loss=level, floor=level)
    judge = Judge(Policy())
    judged(judge, [*source.rows(5, loss=3.0), *source.rows(200)])
    rows = [evaluated(source, 2.0), *source.rows(20, times=1.5), evaluated(source, 2.8, times=1.5)]
    events = judged(judge, [*rows, *source.rows(20, times=1.5), evaluated(source, 2.9, times=1.5)])
    assert any(f.detector == "loss_level" for f in of(Finding, events))
    assert actions(events) == [Action.REWIND] * rewinds


@pytest.mark.parametrize(("falls", "done"), [(0.93, []), (1.0, [Action.REWIND])])
def test_gradients_growing_with_the_lr_are_no_harm_while_the_loss_falls(falls: float, done: list[Action]) -> None:
    judge, source = trained(source=Source(1, loss=3.0, floor=3.0, noise=0.01, scatter=0.02, lr=1e-6))
    rows = [source.row(lr=1e-3, times=falls ** min(k, 9), swells=1.4 ** min(k, 9)) for k in range(14)]
    events = judged(judge, rows)
    assert {"hyperparam_change", "growth"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == done


def test_overfitting_is_not_acted_on() -> None:
    judge, source = trained()
    worse = [row for k in range(10) for row in (*source.rows(24), evaluated(source, 2.0 + 0.3 * k))]
    assert actions(judged(judge, worse)) == []


def test_eval_losses_that_differ_between_ranks_are_not_acted_on() -> None:
    judge, source = trained(alone=False)
    assert actions(judged(judge, harmful_batches(source))) == []


def waiting() -> tuple[Source, list[Event], Decision]:
    judge, source = trained()
    decision = decided(judged(judge, harmful_batches(source)))
    judge.rewound(decision.max_attempt - 1, decision.max_attempt - 1)
    events = judged(judge, [source.row(times=1.6, verdict=Verdict.NORM_OUTLIER, norm_limit=9.0) for _ in range(120)])
    events += judged(judge, source.rows(40))
    return source, events, decision


def test_harmful_batches_are_waited_out() -> None:
    _, events, _ = waiting()
    assert actions(events) == [], "120 consecutive refusals do not stop a run that waits on purpose"
    (outcome,) = of(Outcome, events)
    assert outcome.helped


def test_waiting_is_limited() -> None:
    judge, source = trained(Policy(max_consecutive_vetoes=5))
    decision = decided(judged(judge, harmful_batches(source)))
    judge.rewound(decision.max_attempt - 1, decision.max_attempt - 1)
    events = judged(judge, [source.row(times=1.6, verdict=Verdict.NORM_OUTLIER, norm_limit=9.0) for _ in range(50)])
    stop = decided(events)
    assert stop.action is Action.STOP
    assert "made the eval loss worse" in stop.reason


def test_collapsed_loss_scale_is_reset_without_a_rewind() -> None:
    judge, source = trained(source=Source(1, loss_scale=32768.0))
    rows = [source.row(loss_scale=2.0**-k, verdict=Verdict.OVERFLOW, norm=math.nan) for k in range(12)]
    events = judged(judge, [*rows, *source.rows(3, loss_scale=2.0**-12, norm=0.0)])
    decision = decided(events)
    assert (decision.action, decision.loss_scale) == (Action.CONSTRAIN, 32768.0)
    (outcome,) = of(Outcome, judged(judge, source.rows(40)))
    assert outcome.helped


def test_second_loss_scale_collapse_is_rewound() -> None:
    judge, source = trained(source=Source(1, loss_scale=32768.0))
    judged(judge, source.rows(3, loss_scale=2.0**-12))
    assert actions(judged(judge, source.rows(8, loss_scale=2.0**-12))) == [Action.REWIND]


def slowly_rising_lr(source: Source, rows: int, times: float = 1.0) -> list[StepMetrics]:
    """The lr rises slowly to eight times its value."""
    return [source.row(lr=min(1.1 ** (1 + k), 8.0) * 1e-3, times=times) for k in range(rows)]


def test_slowly_raised_lr_is_capped_without_a_rewind() -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    decision = decided(judged(judge, slowly_rising_lr(source, 60, times=1.03)))
    assert decision.action is Action.CONSTRAIN
    assert decision.overrides is not None
    assert decision.overrides.max_lr == pytest.approx((1e-3,))


@pytest.mark.parametrize(("times", "done"), [(1.04, [Action.CONSTRAIN]), (1.0, [])])
def test_raised_momentum_with_a_higher_loss_is_capped(times: float, done: list[Action]) -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    events = judged(judge, source.rows(50, momentum=0.99, times=times))
    assert "hyperparam_change" in {f.detector for f in of(Finding, events)}
    assert actions(events) == done
    for decision in of(Decision, events):
        assert decision.cause is Cause.MOMENTUM
        assert decision.overrides is not None
        assert decision.overrides.max_momentum == pytest.approx((0.9,))


def test_suddenly_raised_lr_is_rewound_to_right_before_it() -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    decision = decided(judged(judge, source.rows(40, lr=8e-3, times=1.03)))
    assert decision.action is Action.REWIND
    assert decision.max_attempt == 400
    assert decision.overrides is not None
    assert decision.overrides.max_lr == pytest.approx((1e-3,))


def test_lr_cap_that_does_not_help_is_followed_by_a_rewind() -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    events = judged(judge, [*slowly_rising_lr(source, 60, times=1.03), *source.rows(12, lr=8e-3, times=2.5)])
    assert actions(events) == [Action.CONSTRAIN, Action.REWIND]


def test_raised_lr_with_a_worse_eval_loss_is_rewound_immediately() -> None:
    """The training loss shows nothing; a slightly worse eval loss is enough, but only with the raised lr."""
    for lr, done in ((8e-3, [Action.REWIND]), (1e-3, [])):
        judge, source = trained(rows=0, source=Source(1, half=30.0))
        rows = [*source.rows(400), evaluated(source, 2.0, lr=lr), *source.rows(10, lr=lr)]
        events = judged(judge, [*rows, evaluated(source, 2.2, lr=lr), *source.rows(10, lr=lr)])
        assert actions(events) == done
    assert "eval_regression" not in {f.detector for f in of(Finding, events)}


def test_raised_lr_is_blamed_once_until_recovery() -> None:
    """After the rewind the eval loss may still be worse, and the loop still sets the raised lr."""
    judge, source = trained(rows=0, source=Source(1, half=30.0))
    rows = [*source.rows(400), evaluated(source, 2.0, lr=8e-3), *source.rows(10, lr=8e-3)]
    decision = decided(judged(judge, [*rows, evaluated(source, 2.2, lr=8e-3)]))
    judge.rewound(decision.max_attempt - 1, decision.max_attempt - 1)
    for _ in range(4):
        assert actions(judged(judge, [*source.rows(24, lr=8e-3), evaluated(source, 2.2, lr=8e-3)])) == []


@pytest.mark.parametrize(("lr", "done"), [(1e-3, [Action.REWIND]), (4e-3, [])])
def test_warm_restart_explains_a_worse_eval_loss(lr: float, done: list[Action]) -> None:
    judge, source = trained(rows=0)
    judged(judge, [*source.rows(150), evaluated(source, 2.0), *source.rows(10, lr=lr, times=1.5)])
    late = [evaluated(source, 2.8, lr=lr), *source.rows(20, lr=lr), evaluated(source, 2.9, lr=lr)]
    assert actions(judged(judge, late)) == done


def test_cyclic_lr_with_a_slightly_worse_eval_loss_is_no_harm() -> None:
    """The training loss is higher too while the lr is high."""
    judge, source = trained()
    low = [*source.rows(4, lr=1e-4), evaluated(source, 2.0, lr=1e-4)]
    events = judged(judge, [*low, *source.rows(12, times=1.5), evaluated(source, 2.2), *source.rows(10)])
    assert {"loss_level", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == []


def test_lr_cap_after_harm_is_followed_by_a_rewind() -> None:
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    rows = [evaluated(source, 2.0), *slowly_rising_lr(source, 50, times=1.03)]
    events = judged(judge, [*rows, evaluated(source, 2.2)])
    assert actions(events) == [Action.CONSTRAIN, Action.REWIND]
    rewind = of(Decision, events)[-1]
    assert rewind.max_attempt <= 400
    assert rewind.overrides is not None
    assert rewind.overrides.max_lr == pytest.approx((1e-3,))


def test_lr_cap_after_harm_is_followed_by_a_rewind_even_if_evaluated_immediately() -> None:
    """Updates from before the cap say nothing about it, but what they did to the weights remains."""
    judge, source = trained(rows=400, source=Source(1, half=30.0))
    judged(judge, [evaluated(source, 2.0), *slowly_rising_lr(source, 30, times=1.03)])
    while not actions(judged(judge, [source.row(lr=8e-3, times=1.03)])):
        assert source.attempt < 480
    events = judged(judge, [source.row(lr=8e-3), evaluated(source, 2.2, lr=8e-3), *source.rows(10, lr=8e-3)])
    assert actions(events) == [Action.REWIND]


@pytest.mark.parametrize(
    ("well", "lr", "done"),
    [(110, 12e-3, [Action.REWIND]), (110, 6e-3, []), (300, 12e-3, [])],
    ids=["rises further", "stays", "is the baseline by then"],
)
def test_harmless_lr_increase_is_blamed_once_it_continues_and_harms(well: int, lr: float, done: list[Action]) -> None:
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
        assert decision.overrides.max_lr == pytest.approx((1e-3,)), "its value before it was raised"


def test_update_sizes_are_learned_again_after_a_rewind() -> None:
    bench, source = Bench(), Source(0)
    detector = FrozenWeights(("a", "b"), None, bench.normal, adaptive=True)
    damaged = [source.row(update_ratio=1e-3 * 1.5**k) for k in range(14)]
    assert bench.findings(detector, [*source.rows(20, update_ratio=1e-3), *damaged]) == []
    detector.rewound()
    assert bench.findings(detector, source.rows(60, update_ratio=1e-3)) == [], (
        "small only compared with the damaged ones"
    )


def late_eval_harm(source: Source, quiet: int) -> list[StepMetrics]:
    """Bad batches whose effect on the training loss is long over when evaluation shows the harm."""
    rows = [evaluated(source, 2.0), *source.rows(10, times=1.5), *source.rows(quiet), evaluated(source, 2.8)]
    return [*rows, *source.rows(20), evaluated(source, 2.9)]


def test_harm_seen_late_by_evaluation_is_rewound() -> None:
    judge, source = trained()
    healthy_until = source.attempt
    decision = decided(judged(judge, late_eval_harm(source, quiet=70)))
    assert decision.action is Action.REWIND
    assert decision.max_attempt <= healthy_until + 1


def test_harm_older_than_all_snapshots_is_only_reported() -> None:
    judge, source = trained(Policy(snapshot_reach=60))
    events = judged(judge, late_eval_harm(source, quiet=70))
    assert "eval_regression" in {f.detector for f in of(Finding, events)}
    assert actions(events) == []


def test_slowly_rising_eval_loss_is_no_harm() -> None:
    judge, source = trained()
    worse = [row for k in range(10) for row in (*source.rows(24), evaluated(source, 2.0 * 1.05**k))]
    bump = [*source.rows(10, times=1.5), *source.rows(20)]
    assert actions(judged(judge, [*worse, *bump, evaluated(source, 3.4)])) == []


@pytest.mark.parametrize(("widest", "done"), [(25.0, []), (400.0, [Action.REWIND])])
def test_oscillation_far_smaller_than_the_eval_harm_is_not_its_cause(widest: float, done: list[Action]) -> None:
    """As when a model has memorized its samples: the loss and its oscillation are close to zero."""
    judge, source = trained(rows=0, source=Source(1, loss=2.0, floor=0.002, half=8.0))
    judged(judge, [*source.rows(200), evaluated(source, 1.3), *source.rows(10)])
    swings = [source.row(times=max(widest * k / 12, 1.0) if k % 2 else 1.0) for k in range(14)]
    events = judged(judge, [*swings, evaluated(source, 1.6), *source.rows(20), evaluated(source, 1.62)])
    assert {"oscillation", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == done


@pytest.mark.parametrize(("times", "done"), [(1.0, []), (2.5, [Action.REWIND])])
def test_growing_gradients_without_effect_on_the_loss_are_not_the_cause(times: float, done: list[Action]) -> None:
    judge, source = trained(rows=0, source=Source(1, loss=2.0, floor=0.002, half=8.0))
    judged(judge, [*source.rows(200), evaluated(source, 1.3), *source.rows(10)])
    grows = [source.row(times=times**k, swells=1.2**k, norm=0.6 * 1.3**k) for k in range(8)]
    events = judged(judge, [*grows, evaluated(source, 1.6), *source.rows(20), evaluated(source, 1.62)])
    assert {"growth", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == done


@pytest.mark.parametrize(("swells", "times", "done"), [(6.0, 30.0, False), (40.0, 30.0, True), (6.0, 200.0, True)])
def test_jump_far_smaller_than_the_eval_harm_needs_an_unusual_update(swells: float, times: float, done: bool) -> None:
    """The loss is 0.002, so that 30 times as much is still close to zero."""
    judge, source = trained(rows=0, source=Source(1, loss=2.0, floor=0.002, half=8.0))
    judged(judge, [*source.rows(200), evaluated(source, 1.3), *source.rows(10)])
    jump = source.row(times=times, swells=swells)
    events = judged(judge, [jump, *source.rows(9), evaluated(source, 1.6), *source.rows(20), evaluated(source, 1.62)])
    assert {"jump", "eval_regression"} <= {f.detector for f in of(Finding, events)}
    assert bool(actions(events)) == done


def test_single_jump_does_not_rewind_an_lr_that_makes_progress() -> None:
    judge, source = trained(source=Source(1, floor=3.0, lr=1e-6))
    learns = [source.row(lr=1e-3, times=0.98**k) for k in range(20)]
    growing = [source.row(lr=1e-3, times=0.6, swells=1.3**k, norm=1.3**k) for k in range(6)]
    spike = source.row(lr=1e-3, times=1.2, norm=12.0)
    events = judged(judge, [*learns, *growing, spike, *source.rows(30, lr=1e-3, times=0.5)])
    assert {"hyperparam_change", "growth"} <= {f.detector for f in of(Finding, events)}
    assert actions(events) == []


def test_unusual_batch_that_ruins_only_the_eval_loss_is_rewound() -> None:
    usual = {"input_mean": 0.0, "input_std": 1.0, "input_absmax": 3.0}
    judge, source = trained(source=Source(1, **usual))
    healthy_until = source.attempt
    rows = [evaluated(source, 2.0), source.row(input_std=1e5, input_absmax=3e5), *source.rows(20)]
    decision = decided(judged(judge, [*rows, evaluated(source, 3.0), *source.rows(20), evaluated(source, 3.0)]))
    assert decision.action is Action.REWIND
    assert decision.max_attempt <= healthy_until + 1


@pytest.mark.parametrize(("after", "done"), [(1.6, [Action.REWIND]), (1.0, [])])
def test_huge_applied_update_is_rewound_if_the_loss_rose(after: float, done: list[Action]) -> None:
    judge, source = trained()
    assert actions(judged(judge, [source.row(swells=300.0), *source.rows(12, times=after)])) == done


def test_huge_refused_update_is_not_blamed_for_later_harm() -> None:
    judge, source = trained()
    refused = source.row(swells=300.0, verdict=Verdict.NORM_OUTLIER, norm_limit=100.0)
    assert actions(judged(judge, [refused, *source.rows(12, times=1.6)])) == []


@pytest.mark.parametrize(("silent", "done"), [((0,), [Action.REWIND]), ((), [])])
def test_slow_rise_with_dead_layers_is_severe(silent: Sequence[int], done: list[Action]) -> None:
    judge, source = Judge(Policy(), NAMES), Source(3, half=60.0, noise=0.1)
    judged(judge, source.rows(320), (layers(k) for k in range(320)))
    tensors = [layers(k, which=silent, zeros=0.9 if silent else 0.02) for k in range(110)]
    events = judged(judge, source.rows(110, times=1.15), tensors)
    assert any(f.evidence.get("slowly") for f in of(Finding, events) if f.detector == "loss_level")
    assert actions(events) == done


@pytest.mark.parametrize(("often", "done"), [(1, []), (6, [Action.REWIND])])
def test_a_few_high_losses_with_dead_layers_are_chance(often: int, done: list[Action]) -> None:
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
def test_rescaled_loss_with_a_matching_lower_lr_is_intended(lr: float, done: list[Action]) -> None:
    judge, source = trained(source=Source(1, loss=2.0, floor=2.0), adaptive=False)
    assert actions(judged(judge, source.rows(20, times=5.0, swells=5.0, lr=lr))) == done


def test_lr_lowered_by_surefoot_does_not_explain_a_rescaled_loss() -> None:
    judge, source = trained(source=Source(1, loss=2.0, floor=2.0), adaptive=False)
    for _ in range(3):
        decision = decided(judged(judge, source.rows(20, times=5.0)))
        judge.rewound(decision.max_attempt - 1, source.step - 20)
        judged(judge, source.rows(4))
    assert "a quarter of the learning rate" in decision.remedy
    assert decided(judged(judge, source.rows(20, times=5.0))).action is Action.STOP


@pytest.mark.parametrize(("times", "done"), [(1.25, [Action.REWIND]), (1.05, [])])
def test_update_too_large_for_its_lr_is_rewound_after_a_small_rise(times: float, done: list[Action]) -> None:
    judge, source = trained(rows=0, values=10_000)
    weights = {"weight_norm": 10.0, "nonfinite_params": 0.0}
    judged(judge, [source.row(**({"update_ratio": 1e-3} | weights if k % 10 == 0 else {})) for k in range(150)])
    events = judged(judge, [source.row(update_ratio=0.1, **weights), *source.rows(20, times=times)])
    assert actions(events) == done


@pytest.mark.parametrize(("apart", "first"), [(1.0, 1.0), (3.0, 1.0), (10.0, 10.0), (30.0, 10.0)])
def test_steps_as_large_as_an_optimizers_first_are_no_damage(apart: float, first: float) -> None:
    """Ten times as large as usual at the same rate, and the loss rises: unless each weight moves by about as many rates
    as with the first step of its optimizer."""
    judge, source = trained(rows=0, values=10_000, first=first)
    weights = {"weight_norm": 10.0, "nonfinite_params": 0.0}
    large = apart * 1e-3 * math.sqrt(10_000) / 10.0
    usual = {"update_ratio": large / 10.0} | weights
    judged(judge, [source.row(**(usual if k % 10 == 0 else {})) for k in range(150)])
    events = judged(judge, [source.row(update_ratio=large, **weights), *source.rows(20, times=1.6)])
    assert actions(events) == ([] if apart <= first else [Action.REWIND])

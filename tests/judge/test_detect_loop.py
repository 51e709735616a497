"""What comes in, what the loop does to the gradients, what held-out data says, and who writes to the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from made_rows import NAMES, Bench, Source, actions, judged, of, trained

from surefoot.judge.detectors.data import InputShift, TinyBatches
from surefoot.judge.detectors.evaluation import EvalRise
from surefoot.judge.detectors.gradients import StaleGrads
from surefoot.judge.detectors.hyperparams import ClippingChanged
from surefoot.judge.detectors.weights import FrozenWeights, WeightJump
from surefoot.judge.judge import Judge
from surefoot.judge.param_roles import cause_at_module
from surefoot.records import Action, Cause, Decision, Diagnosis, Event, Finding, StepMetrics


def fed(source: Source, count: int, *, mean: float = 0.0, spread: float = 1.0, drift: float = 0.0) -> list[StepMetrics]:
    """Rows whose batches have about this mean and spread; the mean moves by `drift` a row."""
    rows: list[StepMetrics] = []
    for k in range(count):
        here = mean + drift * k + 0.02 * math.sin(7.0 * k)
        rows.append(source.row(input_mean=here, input_std=spread * (1 + 0.01 * math.cos(3.0 * k)), input_absmax=4.0))
    return rows


def named(events: Iterable[Event]) -> list[Cause]:
    return [d.cause for d in of(Diagnosis, events)]


# -- inputs


def test_ordinary_batches_are_nothing_to_speak_of() -> None:
    bench = Bench()
    assert bench.said(InputShift(bench.sight), fed(Source(0), 400)) == []


def test_one_strange_batch_is_a_bad_batch_and_many_are_another_input() -> None:
    for count, cause in ((1, Cause.BAD_BATCH), (30, Cause.INPUT_SCALE)):
        judge, source = trained(rows=0)
        judged(judge, fed(source, 150))
        events = judged(judge, [*fed(source, count, spread=9.0), *fed(source, 30)])
        assert named(events)[0] is cause


def test_inputs_that_move_little_by_little_drift() -> None:
    judge, source = trained(rows=0)
    judged(judge, fed(source, 150))
    events = judged(judge, fed(source, 60, drift=0.01))
    assert named(events)[0] is Cause.DRIFT


def test_inputs_that_have_long_been_others_are_the_usual() -> None:
    bench, source = Bench(), Source(0)
    detector = InputShift(bench.sight)
    bench.said(detector, fed(source, 150))
    (found,) = bench.said(detector, fed(source, 300, spread=5.0))
    assert "unlike" in found.detail
    assert len(bench.said(detector, fed(source, 5))) == 1, "and what was usual once is strange now"


def test_a_batch_that_is_not_finite_is_the_culprit() -> None:
    judge, source = trained(rows=0)
    judged(judge, fed(source, 150))
    bad = source.nan(input_mean=math.nan, input_std=math.nan, input_absmax=math.inf)
    assert named(judged(judge, [bad, *fed(source, 20)]))[0] is Cause.BAD_BATCH


# -- what the loop does to the gradients


def test_gradients_that_nobody_empties_are_emptied_once_they_pile_up() -> None:
    judge, source = trained()
    calm = judged(judge, source.rows(10, stale_grads=0.0))
    assert actions(calm) == []
    events = judged(judge, [source.row(stale_grads=1.0, swells=3.0 + k) for k in range(6)])
    decision = next(d for d in of(Decision, events) if d.action is Action.REWIND)
    assert decision.cause is Cause.ACCUMULATION
    assert decision.overrides is not None
    assert decision.overrides.zero_stale_grads


def test_what_was_left_over_and_emptied_is_no_news() -> None:
    bench = Bench()
    assert bench.said(StaleGrads(), Source(0).rows(50, stale_grads=0.5)) == []
    assert len(bench.said(StaleGrads(), Source(0).rows(50, stale_grads=1.0))) == 1


def test_clipping_that_is_lost_is_put_in_force_again_when_the_run_suffers() -> None:
    judge, source = trained(rows=0)
    judged(judge, source.rows(150, applied_norm=0.1))
    quiet = judged(judge, source.rows(10, applied_norm=0.12))
    assert actions(quiet) == [], "a threshold may be moved a little"
    events = judged(judge, [source.row(applied_norm=2.0, times=1.3**k) for k in range(1, 12)])
    decision = next(d for d in of(Decision, events) if d.action is Action.REWIND)
    assert decision.cause is Cause.EXPLODING_GRADIENT
    assert decision.overrides is not None
    assert decision.overrides.clip == pytest.approx((0.1,), rel=0.1)


def test_a_loop_that_leaves_next_to_nothing_of_its_gradients() -> None:
    bench, source = Bench(), Source(0)
    detector = ClippingChanged(bench.normal)
    assert bench.said(detector, source.rows(150, applied_norm=0.5)) == []
    (found,) = bench.said(detector, source.rows(20, applied_norm=1e-4))
    assert found.evidence["times"] < 1


# -- held-out data


def evaluated(source: Source, losses: Iterable[float]) -> list[StepMetrics]:
    return [row for loss in losses for row in (*source.rows(24), source.row(eval_loss=loss))]


def test_held_out_loss_that_rises_while_training_goes_on_falling() -> None:
    bench, source = Bench(), Source(0)
    detector = EvalRise(bench.normal)
    assert bench.said(detector, evaluated(source, (3.0, 2.8, 2.6, 2.7, 2.6, 2.65))) == [], "noise is no rise"
    (found,) = bench.said(detector, evaluated(source, (2.8, 2.9, 3.0, 3.1, 3.2)))
    assert found.evidence["apart"]


# -- weights


def test_updates_that_are_rounded_away() -> None:
    bench, source = Bench(), Source(0)
    detector = FrozenWeights(NAMES, None, bench.normal, adaptive=True)
    assert bench.said(detector, source.rows(20, unchanged_fraction=0.1)) == []
    (found,) = bench.said(detector, source.rows(20, unchanged_fraction=0.9))
    assert found.evidence["unchanged_fraction"] == 0.9


def test_refused_updates_are_not_taken_for_updates_that_are_rounded_away() -> None:
    bench, source = Bench(), Source(0)
    detector = FrozenWeights(NAMES, None, bench.normal, adaptive=True)
    assert bench.said(detector, source.rows(20, unchanged_fraction=0.1)) == []
    for _ in range(10):  # the row after a refused update tells that no weight has moved
        refused_then_landed = [source.nan(), source.row(unchanged_fraction=1.0), source.row(unchanged_fraction=0.1)]
        assert bench.said(detector, refused_then_landed) == []


def looked(source: Source, count: int, norm: float, **more: float) -> list[StepMetrics]:
    """Rows of which every tenth tells of the weights."""
    told = {"weight_norm": norm, "update_ratio": 2e-3, "nonfinite_params": 0.0}
    return [source.row(**more, **(told if source.attempt % 10 == 0 else {})) for _ in range(count)]


def test_weights_that_no_update_has_changed_are_brought_back_when_the_loss_has_risen() -> None:
    judge, source = trained(rows=0)
    judged(judge, looked(source, 150, 10.0))
    events = judged(judge, looked(source, 30, 20.0, times=1.6))
    assert named(events)[0] is Cause.WEIGHTS_DAMAGED
    assert actions(events) == [Action.REWIND]


def test_weights_that_were_changed_on_purpose_are_left_alone_while_the_loss_is_sound() -> None:
    judge, source = trained(rows=0)
    judged(judge, looked(source, 150, 10.0))
    assert actions(judged(judge, looked(source, 100, 20.0))) == []


def test_weights_of_another_size_altogether_are_brought_back_from_before_the_last_look_that_was_sound() -> None:
    judge, source = trained(rows=0)
    judged(judge, looked(source, 145, 10.0))
    events = judged(judge, [*source.rows(3), *looked(source, 12, 60.0)])
    assert named(events)[0] is Cause.WEIGHTS_DAMAGED
    (decision,) = [d for d in of(Decision, events) if d.action is not Action.REFUSE]
    assert decision.action is Action.REWIND
    assert decision.max_attempt == 140, "what was taken after that may hold them already"
    assert decision.attempt > 150 + 4, "what else it did may tell more of the cause"
    judge.rewound(130, 130)
    assert actions(judged(judge, looked(source, 40, 10.0))) == [], "that they are as before is no leap"
    assert actions(judged(judge, looked(source, 20, 60.0))) == [Action.REWIND], "and a second one is"


def test_weights_that_updates_as_large_as_those_seen_have_moved_are_not_told() -> None:
    bench = Bench()
    for ratio, leaps in ((2e-3, True), (0.2, False)):
        source, detector = Source(0), WeightJump()
        told = [source.row(weight_norm=10.0, update_ratio=ratio) for _ in range(30)]
        assert bench.said(detector, told) == []
        source.attempt += 9
        found = bench.said(detector, [source.row(weight_norm=18.0, update_ratio=ratio)])
        assert bool(found) is leaps
        assert not any(f.severe for f in found)


def test_the_same_loss_with_the_same_weights_is_no_damage() -> None:
    judge, source = trained(rows=0)
    judged(judge, looked(source, 150, 10.0))
    events = judged(judge, looked(source, 60, 10.0, times=1.6))
    assert Cause.WEIGHTS_DAMAGED is not named(events)[0]
    assert actions(events) == []


def test_a_judge_asks_for_a_look_at_the_weights_when_trouble_begins() -> None:
    judge, source = trained()
    assert not judge.wants_weight_check
    judged(judge, [source.row(swells=30.0)])
    assert judge.wants_weight_check


# -- where it began


@pytest.mark.parametrize(
    ("module", "kind", "cause"),
    [
        ("blocks.3.attention", "Attention", Cause.ATTENTION_MASK),
        ("blocks.3.norm1", "LayerNorm", Cause.ZERO_VARIANCE),
        ("softmax", "Softmax", Cause.ATTENTION_MASK),
        ("blocks.3.attention.qkv", "Linear", Cause.PRECISION_OVERFLOW),
        ("", "", Cause.LOG_OF_ZERO),
        ("mystery", "Mystery", Cause.UNKNOWN),
    ],
)
def test_the_place_speaks_for_a_cause(module: str, kind: str, cause: Cause) -> None:
    assert cause_at_module(module, kind, inputs=False, weights=False)[0] is cause


def test_the_place_that_was_found_out_is_what_is_named() -> None:
    judge, source = trained(names=NAMES)
    events = judged(judge, [source.nan(), *source.rows(8)])
    assert named(events) == [], "one value that is not a number says little"
    again = source.nan()
    judged(judge, [again])
    judge.located(again, "layers.0.norm", "LayerNorm", inputs=False, weights=False)
    assert named(judged(judge, source.rows(3)))[0] is Cause.ZERO_VARIANCE


def test_an_open_case_is_kept_with_the_state() -> None:
    judge, source = trained()
    judged(judge, [source.row(times=3.0) for _ in range(3)])
    other = Judge(judge.policy)
    other.load_state_dict(judge.state_dict())
    after = [source.row(times=3.0) for _ in range(12)]
    assert [repr(e) for e in judged(other, after)] == [repr(e) for e in judged(judge, after)]
    assert not other.quiet


# -- batches of another size


@pytest.mark.parametrize(
    ("normed", "samples", "rows", "said"),
    [(True, 2, 3, 1), (True, 2, 60, 1), (True, 2, 1, 0), (True, 16, 60, 0), (False, 2, 60, 0)],
)
def test_a_norm_over_a_few_samples_is_told_once(normed: bool, samples: int, rows: int, said: int) -> None:
    """And not for the last batch of an epoch, nor where nothing is normalised over the batch."""
    bench, source = Bench(), Source(0)
    detector = TinyBatches(bench.normal, has_batch_norm=normed)
    assert bench.said(detector, source.rows(100, samples=64)) == []
    assert len(bench.said(detector, source.rows(rows, samples=samples))) == said


@pytest.mark.parametrize(("samples", "told"), [(4, False), (64, True)])
def test_losses_of_smaller_batches_may_scatter_further(samples: int, told: bool) -> None:
    """Sixteen times fewer samples make four times the scatter: what stands out of large batches does not of small."""
    judge, source = trained(rows=0)
    judged(judge, source.rows(200, samples=64))
    events = judged(judge, [source.row(samples=samples, times=2.0, swells=3.0) for _ in range(6)])
    assert ("jump" in {f.detector for f in of(Finding, events)}) == told


def test_smaller_batches_may_scatter_further_until_next_to_all_that_is_known_comes_from_them() -> None:
    bench, source = Bench(), Source(0)

    def wider(rows: int) -> float:
        bench.add(source.rows(rows, samples=4))
        return bench.normal.sigma_factor

    bench.add(source.rows(150, samples=64))
    assert wider(1) == 4.0
    assert wider(59) == 4.0, "most of the last losses are of small batches by now, and some are not"
    assert wider(40) == 1.0

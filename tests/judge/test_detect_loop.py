"""Detectors of inputs, of changes the loop makes to gradients, of eval losses, and of changes to weights."""

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
    """Rows whose inputs have about this mean and standard deviation; the mean moves by `drift` a row."""
    rows: list[StepMetrics] = []
    for k in range(count):
        here = mean + drift * k + 0.02 * math.sin(7.0 * k)
        rows.append(source.row(input_mean=here, input_std=spread * (1 + 0.01 * math.cos(3.0 * k)), input_absmax=4.0))
    return rows


def named(events: Iterable[Event]) -> list[Cause]:
    return [d.cause for d in of(Diagnosis, events)]


# -- inputs


def test_ordinary_batches_give_no_finding() -> None:
    bench = Bench()
    assert bench.findings(InputShift(bench.sight), fed(Source(0), 400)) == []


def test_one_unusual_batch_is_a_bad_batch_and_many_are_an_input_shift() -> None:
    for count, cause in ((1, Cause.BAD_BATCH), (30, Cause.INPUT_SCALE)):
        judge, source = trained(rows=0)
        judged(judge, fed(source, 150))
        events = judged(judge, [*fed(source, count, spread=9.0), *fed(source, 30)])
        assert named(events)[0] is cause


def test_slowly_moving_inputs_are_drift() -> None:
    judge, source = trained(rows=0)
    judged(judge, fed(source, 150))
    events = judged(judge, fed(source, 60, drift=0.01))
    assert named(events)[0] is Cause.DRIFT


def test_lasting_input_shift_becomes_the_baseline() -> None:
    bench, source = Bench(), Source(0)
    detector = InputShift(bench.sight)
    bench.findings(detector, fed(source, 150))
    (finding,) = bench.findings(detector, fed(source, 300, spread=5.0))
    assert "unlike" in finding.detail
    assert len(bench.findings(detector, fed(source, 5))) == 1, "the original inputs are the unusual ones now"


def test_nonfinite_batch_is_named_as_the_cause() -> None:
    judge, source = trained(rows=0)
    judged(judge, fed(source, 150))
    bad = source.nan(input_mean=math.nan, input_std=math.nan, input_absmax=math.inf)
    assert named(judged(judge, [bad, *fed(source, 20)]))[0] is Cause.BAD_BATCH


# -- what the loop does to the gradients


def test_stale_gradients_are_zeroed_once_they_accumulate() -> None:
    judge, source = trained()
    calm = judged(judge, source.rows(10, stale_grads=0.0))
    assert actions(calm) == []
    events = judged(judge, [source.row(stale_grads=1.0, swells=3.0 + k) for k in range(6)])
    decision = next(d for d in of(Decision, events) if d.action is Action.REWIND)
    assert decision.cause is Cause.ACCUMULATION
    assert decision.overrides is not None
    assert decision.overrides.zero_stale_grads


def test_partly_zeroed_gradients_give_no_finding() -> None:
    bench = Bench()
    assert bench.findings(StaleGrads(), Source(0).rows(50, stale_grads=0.5)) == []
    assert len(bench.findings(StaleGrads(), Source(0).rows(50, stale_grads=1.0))) == 1


def test_missing_clipping_is_restored_when_the_run_is_harmed() -> None:
    judge, source = trained(rows=0)
    judged(judge, source.rows(150, applied_norm=0.1))
    quiet = judged(judge, source.rows(10, applied_norm=0.12))
    assert actions(quiet) == [], "small changes of the threshold are allowed"
    events = judged(judge, [source.row(applied_norm=2.0, times=1.3**k) for k in range(1, 12)])
    decision = next(d for d in of(Decision, events) if d.action is Action.REWIND)
    assert decision.cause is Cause.EXPLODING_GRADIENT
    assert decision.overrides is not None
    assert decision.overrides.clip == pytest.approx((0.1,), rel=0.1)


def test_loop_that_shrinks_its_gradients_to_almost_zero_is_found() -> None:
    bench, source = Bench(), Source(0)
    detector = ClippingChanged(bench.normal)
    assert bench.findings(detector, source.rows(150, applied_norm=0.5)) == []
    (finding,) = bench.findings(detector, source.rows(20, applied_norm=1e-4))
    assert finding.evidence["times"] < 1


# -- eval losses


def evaluated(source: Source, losses: Iterable[float]) -> list[StepMetrics]:
    return [row for loss in losses for row in (*source.rows(24), source.row(eval_loss=loss))]


def test_rising_eval_loss_with_falling_training_loss_is_found() -> None:
    bench, source = Bench(), Source(0)
    detector = EvalRise(bench.normal)
    assert bench.findings(detector, evaluated(source, (3.0, 2.8, 2.6, 2.7, 2.6, 2.65))) == [], "noise is not a rise"
    (finding,) = bench.findings(detector, evaluated(source, (2.8, 2.9, 3.0, 3.1, 3.2)))
    assert finding.evidence["apart"]


# -- weights


def test_updates_lost_to_rounding_are_found() -> None:
    bench, source = Bench(), Source(0)
    detector = FrozenWeights(NAMES, None, bench.normal, adaptive=True)
    assert bench.findings(detector, source.rows(20, unchanged_fraction=0.1)) == []
    (finding,) = bench.findings(detector, source.rows(20, unchanged_fraction=0.9))
    assert finding.evidence["unchanged_fraction"] == 0.9


def test_refused_updates_are_not_counted_as_lost_to_rounding() -> None:
    bench, source = Bench(), Source(0)
    detector = FrozenWeights(NAMES, None, bench.normal, adaptive=True)
    assert bench.findings(detector, source.rows(20, unchanged_fraction=0.1)) == []
    for _ in range(10):  # the row after a refused update reports that no weight changed
        refused_then_applied = [source.nan(), source.row(unchanged_fraction=1.0), source.row(unchanged_fraction=0.1)]
        assert bench.findings(detector, refused_then_applied) == []


def with_weight_stats(source: Source, count: int, norm: float, **more: float) -> list[StepMetrics]:
    """Rows of which every tenth has weight statistics."""
    weight_stats = {"weight_norm": norm, "update_ratio": 2e-3, "nonfinite_params": 0.0}
    return [source.row(**more, **(weight_stats if source.attempt % 10 == 0 else {})) for _ in range(count)]


def test_weights_changed_outside_the_optimizer_are_rewound_if_the_loss_rose() -> None:
    judge, source = trained(rows=0)
    judged(judge, with_weight_stats(source, 150, 10.0))
    events = judged(judge, with_weight_stats(source, 30, 20.0, times=1.6))
    assert named(events)[0] is Cause.WEIGHTS_DAMAGED
    assert actions(events) == [Action.REWIND]


def test_weights_changed_on_purpose_are_kept_while_the_loss_is_healthy() -> None:
    judge, source = trained(rows=0)
    judged(judge, with_weight_stats(source, 150, 10.0))
    assert actions(judged(judge, with_weight_stats(source, 100, 20.0))) == []


def test_huge_weight_change_is_rewound_to_before_the_last_healthy_measurement() -> None:
    judge, source = trained(rows=0)
    judged(judge, with_weight_stats(source, 145, 10.0))
    events = judged(judge, [*source.rows(3), *with_weight_stats(source, 12, 60.0)])
    assert named(events)[0] is Cause.WEIGHTS_DAMAGED
    (decision,) = [d for d in of(Decision, events) if d.action is not Action.REFUSE]
    assert decision.action is Action.REWIND
    assert decision.max_attempt == 140, "later snapshots may already contain the change"
    assert decision.attempt > 150 + 4, "it waits for further evidence of the cause"
    judge.rewound(130, 130)
    assert actions(judged(judge, with_weight_stats(source, 40, 10.0))) == [], "restored weights are no jump"
    assert actions(judged(judge, with_weight_stats(source, 20, 60.0))) == [Action.REWIND], "a second change is"


def test_weight_change_is_found_unless_update_sizes_explain_it() -> None:
    bench = Bench()
    for ratio, is_found in ((2e-3, True), (0.2, False)):
        source, detector = Source(0), WeightJump()
        healthy_rows = [source.row(weight_norm=10.0, update_ratio=ratio) for _ in range(30)]
        assert bench.findings(detector, healthy_rows) == []
        source.attempt += 9
        findings = bench.findings(detector, [source.row(weight_norm=18.0, update_ratio=ratio)])
        assert bool(findings) is is_found
        assert not any(f.severe for f in findings)


def test_unchanged_loss_with_unchanged_weights_is_no_damage() -> None:
    judge, source = trained(rows=0)
    judged(judge, with_weight_stats(source, 150, 10.0))
    events = judged(judge, with_weight_stats(source, 60, 10.0, times=1.6))
    assert Cause.WEIGHTS_DAMAGED is not named(events)[0]
    assert actions(events) == []


def test_judge_requests_weight_stats_when_an_incident_begins() -> None:
    judge, source = trained()
    assert not judge.wants_weight_check
    judged(judge, [source.row(swells=30.0)])
    assert judge.wants_weight_check


# -- location of the first non-finite value


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
def test_location_of_the_first_nonfinite_value_supports_a_cause(module: str, kind: str, cause: Cause) -> None:
    assert cause_at_module(module, kind, inputs=False, weights=False)[0] is cause


def test_traced_location_is_named_in_the_diagnosis() -> None:
    judge, source = trained(names=NAMES)
    events = judged(judge, [source.nan(), *source.rows(8)])
    assert named(events) == [], "a single NaN is too little evidence"
    again = source.nan()
    judged(judge, [again])
    judge.located(again, "layers.0.norm", "LayerNorm", inputs=False, weights=False)
    assert named(judged(judge, source.rows(3)))[0] is Cause.ZERO_VARIANCE


def test_open_incident_is_saved_in_the_state() -> None:
    judge, source = trained()
    judged(judge, [source.row(times=3.0) for _ in range(3)])
    other = Judge(judge.policy)
    other.load_state_dict(judge.state_dict())
    after = [source.row(times=3.0) for _ in range(12)]
    assert [repr(e) for e in judged(other, after)] == [repr(e) for e in judged(judge, after)]
    assert not other.quiet


# -- batches of another size


@pytest.mark.parametrize(
    ("normed", "samples", "rows", "num_findings"),
    [(True, 2, 3, 1), (True, 2, 60, 1), (True, 2, 1, 0), (True, 16, 60, 0), (False, 2, 60, 0)],
)
def test_batch_norm_over_few_samples_is_found_once(normed: bool, samples: int, rows: int, num_findings: int) -> None:
    """Not for the last batch of an epoch, nor without batch norm."""
    bench, source = Bench(), Source(0)
    detector = TinyBatches(bench.normal, has_batch_norm=normed)
    assert bench.findings(detector, source.rows(100, samples=64)) == []
    assert len(bench.findings(detector, source.rows(rows, samples=samples))) == num_findings


@pytest.mark.parametrize(("samples", "is_jump"), [(4, False), (64, True)])
def test_smaller_batches_are_allowed_noisier_losses(samples: int, is_jump: bool) -> None:
    """A sixteenth of the samples has four times the noise: an outlier for large batches is none for small ones."""
    judge, source = trained(rows=0)
    judged(judge, source.rows(200, samples=64))
    events = judged(judge, [source.row(samples=samples, times=2.0, swells=3.0) for _ in range(6)])
    assert ("jump" in {f.detector for f in of(Finding, events)}) == is_jump


def test_allowance_for_smaller_batches_ends_once_the_baseline_consists_of_them() -> None:
    bench, source = Bench(), Source(0)

    def wider(rows: int) -> float:
        bench.add(source.rows(rows, samples=4))
        return bench.normal.sigma_factor

    bench.add(source.rows(150, samples=64))
    assert wider(1) == 4.0
    assert wider(59) == 4.0, "most recent losses are of small batches, but not all"
    assert wider(40) == 1.0

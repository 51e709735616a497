"""The rules of other projects on hand-made series and in a training loop."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.zoo.other_rules import (
    ALARM_RULES,
    INTERVENTION_RULES,
    AlarmRule,
    ClipAtOne,
    ClipAtOneAndSkip,
    InterventionRule,
    NanCheck,
    NotesPredictor,
    SixSigma,
    SixSigmaSkip,
    SkipNonFinite,
    TenTimesFirstHundred,
    ThreeTimesMeanOfTen,
    TwiceTheMeanFiveTimes,
    ZClip,
    ZScoreAlarm,
)
from benchmarks.zoo.training import RunSettings, ZooRun, train_step

NORMS = st.floats(1e-6, 1e12)


def alarms(rule: AlarmRule, losses: Iterable[float], norms: Iterable[float] | None = None) -> list[int]:
    """The steps at which a rule raises an alarm; the default norm is 1 throughout."""
    losses = list(losses)
    norms = [1.0] * len(losses) if norms is None else list(norms)
    pairs = zip(losses, norms, strict=True)
    return [step for step, (loss, norm) in enumerate(pairs) if rule.update(loss, norm, 1e-3)]


def healthy_series(steps: int) -> list[float]:
    """Values that fall slowly from 2, with a little noise."""
    rng = random.Random(1)
    return [2.0 - 0.001 * k + rng.uniform(-0.05, 0.05) for k in range(steps)]


def test_each_rule_has_a_name_and_a_source() -> None:
    all_rules = [make() for make in (*ALARM_RULES, *INTERVENTION_RULES)]
    assert len({rule.name for rule in all_rules}) == len(all_rules)
    assert all(rule.source for rule in all_rules)


@pytest.mark.parametrize("make", ALARM_RULES)
def test_no_rule_alarms_on_a_healthy_series(make: Callable[[], AlarmRule]) -> None:
    assert alarms(make(), healthy_series(400), healthy_series(400)) == []


@pytest.mark.parametrize("make", ALARM_RULES)
def test_new_rule_has_no_state(make: Callable[[], AlarmRule]) -> None:
    used = make()
    alarms(used, [math.nan] * 200, [math.inf] * 200)
    assert alarms(make(), healthy_series(200), healthy_series(200)) == []


# -- alarm rules


def test_nan_check_alarms_on_nonfinite_losses_only() -> None:
    assert alarms(NanCheck(), [1.0, 1e30, math.nan, math.inf, 1.0]) == [2, 3]
    assert alarms(NanCheck(), [1.0, 1.0], [math.nan, math.inf]) == []


def test_three_times_the_mean_of_ten() -> None:
    assert alarms(ThreeTimesMeanOfTen(), [1.0] * 12 + [2.9]) == []
    assert alarms(ThreeTimesMeanOfTen(), [1.0] * 12 + [3.0, 3.0, 1.0]) == [12, 13]
    assert alarms(ThreeTimesMeanOfTen(), [5.0, 5.0] + [1.0] * 10 + [3.0]) == [12]
    assert alarms(ThreeTimesMeanOfTen(), [1.0, math.nan, 1.0, math.inf, 1.0]) == [1, 3]
    assert alarms(ThreeTimesMeanOfTen(), [-1.0] * 12 + [-4.0]) == []


def test_three_times_the_mean_misses_a_slow_rise() -> None:
    assert alarms(ThreeTimesMeanOfTen(), [1.2**k for k in range(60)]) == []


def test_twice_the_mean_must_hold_five_times() -> None:
    base = [1.0] * 100
    assert alarms(TwiceTheMeanFiveTimes(), base + [9.0] * 4 + [1.0] + [9.0] * 4) == []
    assert alarms(TwiceTheMeanFiveTimes(), base + [9.0] * 6 + [1.0, 9.0]) == [104, 105]
    assert alarms(TwiceTheMeanFiveTimes(), base + [2.5] * 5) == [104]
    assert alarms(TwiceTheMeanFiveTimes(), base + [1.9] * 50) == []
    assert alarms(TwiceTheMeanFiveTimes(), base[:99] + [9.0] * 5) == []


def test_nan_silences_twice_the_mean_for_its_window() -> None:
    steps = alarms(TwiceTheMeanFiveTimes(), [1.0] * 100 + [math.nan] + [1.0] * 50 + [9.0] * 60)
    assert steps == []


def test_ten_times_the_first_hundred_for_loss_and_norm() -> None:
    base = [1.0] * 99 + [2.0]
    rest = [1.0] * 3
    assert alarms(TenTimesFirstHundred(), [*base, 19.9, 20.0, 1.0]) == [101]
    assert alarms(TenTimesFirstHundred(), base + rest, [*base, 19.9, 20.0, 1.0]) == [101]
    assert alarms(TenTimesFirstHundred(), [1.0] * 50 + [99.0] * 50 + [900.0]) == []
    assert alarms(TenTimesFirstHundred(), [*base, math.nan, math.inf, 1.0]) == []


def test_six_sigma_alarms_on_upward_outliers_of_loss_and_norm() -> None:
    base = healthy_series(200)
    assert alarms(SixSigma(), [*base, 5.0], healthy_series(201)) == [200]
    assert alarms(SixSigma(), healthy_series(201), [*base, 5.0]) == [200]
    assert alarms(SixSigma(), [*base, 0.0], healthy_series(201)) == []
    assert alarms(SixSigma(), [*healthy_series(62), 99.0], healthy_series(63)) == []


def test_six_sigma_uses_the_last_128_values() -> None:
    norms = [*[9.0] * 50, *healthy_series(128)]
    bound = statistics.fmean(norms[50:]) + 6 * statistics.stdev(norms[50:])
    assert alarms(SixSigma(), [1.0] * 179, [*norms, bound * 0.9999]) == []
    assert alarms(SixSigma(), [1.0] * 179, [*norms, bound * 1.0001]) == [178]


def test_six_sigma_widens_with_rejected_values() -> None:
    steps = alarms(SixSigma(), healthy_series(150) + [5.0] * 20, healthy_series(170))
    assert steps[0] == 150
    assert len(steps) < 10


def test_one_nan_costs_six_sigma_129_steps() -> None:
    steps = alarms(SixSigma(), [*healthy_series(150), math.nan, *healthy_series(200)], healthy_series(351))
    assert steps == list(range(150, 150 + 129))


def test_z_score_uses_the_norm_only() -> None:
    norms = [1.0, 1.2] * 20
    assert alarms(ZScoreAlarm(), healthy_series(43), [*norms, 3.0, 1.0, 1.2]) == [40]
    assert alarms(ZScoreAlarm(), [*healthy_series(40), 99.0], [*norms, 1.0]) == []
    assert alarms(ZScoreAlarm(), healthy_series(25), [*norms[:24], 99.0]) == []
    first = [*[1.0, 1.2] * 12, 1.1]
    deviation = statistics.pstdev(first)
    assert alarms(ZScoreAlarm(), healthy_series(26), [*first, 1.1 + 2.49 * deviation]) == []
    assert alarms(ZScoreAlarm(), healthy_series(26), [*first, 1.1 + 2.51 * deviation]) == [25]


def test_one_nan_disables_the_z_score_for_good() -> None:
    norms = [*[1.0, 1.2] * 20, math.nan, *[1.0, 1.2] * 20, 1e6]
    assert alarms(ZScoreAlarm(), [1.0] * len(norms), norms) == []


# -- the notes' predictor


def predict(repaired: bool, losses: list[float], norms: list[float]) -> tuple[NotesPredictor, bool]:
    rule = NotesPredictor(repaired)
    alarms_by_step = [rule.update(loss, norm, 1e-3) for loss, norm in zip(losses, norms, strict=True)]
    return rule, alarms_by_step[-1]


NORM_JUMP = [1.0] * 30 + [6.0]
BLOW_UP = [1.0] * 27 + [1.0, 1.2, 2.0, 4.0]


def test_notes_predictor_signals_and_weights() -> None:
    steady = [1.0] * 31
    assert predict(False, [1.0] * 28 + [1.1, 1.2, 1.3], steady)[0].signals() == (0.3, 0.0, 0.0, 0.0)
    assert predict(False, [1.0] * 28 + [0.8, 0.8, 1.0], steady)[0].signals() == (0.0, 0.4, 0.0, 0.0)
    assert predict(False, [1.0] * 27 + [1.2, 1.0, 1.1, 1.2], steady)[0].signals() == (0.0, 0.0, 0.0, 0.0)
    assert predict(False, steady, NORM_JUMP)[0].signals() == (0.0, 0.0, 0.5, 0.0)
    assert predict(False, steady, [1.0] * 29 + [3.0, 6.0])[0].signals() == (0.0, 0.0, 0.5, 0.0)
    assert predict(True, steady, [1.0] * 28 + [3.0, 3.0, 3.5])[0].signals() == (0.0, 0.0, 0.0, 0.0)
    assert predict(True, steady, [1.0] * 30 + [2.5])[0].signals() == (0.0, 0.0, 0.0, 0.6)


def test_notes_predictor_as_written_stays_below_the_threshold() -> None:
    rule, alarm = predict(False, BLOW_UP, NORM_JUMP)
    assert rule.probability == pytest.approx(0.79)
    assert not alarm


@given(st.lists(st.tuples(NORMS, NORMS), min_size=20, max_size=60))
def test_notes_predictor_as_written_never_alerts(steps: list[tuple[float, float]]) -> None:
    rule = NotesPredictor(repaired=False)
    for loss, norm in steps:
        assert not rule.update(loss, norm, 1e-3)
        if len(rule.norms) == 20:
            assert rule.signals()[3] == 0.0


def test_repaired_predictor_alerts_on_a_norm_jump() -> None:
    rule, alarm = predict(True, [1.0] * 31, NORM_JUMP)
    assert rule.signals() == (0.0, 0.0, 0.5, 0.6)
    assert alarm
    assert predict(True, BLOW_UP, NORM_JUMP)[0].probability == pytest.approx(0.916)


def test_repaired_predictor_recovers_and_survives_nan() -> None:
    assert alarms(NotesPredictor(repaired=True), [1.0] * 60, [*NORM_JUMP, *[1.0] * 29]) == [30]
    assert alarms(NotesPredictor(repaired=True), [1.0] * 36, [math.nan, *[1.0] * 4, *NORM_JUMP]) == [35]
    broken = [*[1.0] * 20, math.nan, *[1.0] * 5, 6.0]
    assert alarms(NotesPredictor(repaired=True), [1.0] * 27, broken) == [26]


def test_nan_is_no_signal_of_the_notes_predictor() -> None:
    for repaired in (False, True):
        assert alarms(NotesPredictor(repaired), [1.0] * 25 + [math.nan] * 5, [1.0] * 25 + [math.nan] * 5) == []


# -- intervention rules


def make_run(steps: int = 300) -> ZooRun:
    return ZooRun(RunSettings(family="plain", seed=11, steps=steps))


def loop(run: ZooRun, actor: InterventionRule, steps: int) -> None:
    actor.begin(run, run.model)
    for step in range(steps):
        train_step(run, step, actor, run.model)


def weights(run: ZooRun) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()]).clone()


def set_grad_norm(run: ZooRun, norm: float) -> None:
    """Set gradients of this norm."""
    count = sum(p.numel() for p in run.model.parameters())
    for p in run.model.parameters():
        p.grad = torch.full_like(p, norm / math.sqrt(count))


def norm_of(run: ZooRun) -> float:
    return float(torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]).norm())


def allowed(run: ZooRun, actor: InterventionRule, norm: float, loss: float = 1.0) -> bool:
    run.step += 1
    set_grad_norm(run, norm)
    return actor.allow(run, loss)


@pytest.mark.parametrize("actor", [SkipNonFinite(), ClipAtOneAndSkip(), SixSigmaSkip()])
def test_nan_gradient_is_skipped(actor: InterventionRule) -> None:
    run = make_run()
    before: list[Tensor] = []
    run.before_step(lambda step: before.append(weights(run)))
    first = next(run.model.parameters())
    run.on_gradient_of(first, lambda step, g: g * math.nan if step == 70 else g)
    loop(run, actor, 71)
    assert actor.acted[-1] == 70
    assert torch.equal(weights(run), before[70])
    assert not torch.equal(before[1], before[0])


@pytest.mark.parametrize("actor", [ClipAtOne(), ZClip()])
def test_clipping_alone_lets_a_nan_gradient_pass(actor: InterventionRule) -> None:
    run = make_run()
    first = next(run.model.parameters())
    run.on_gradient_of(first, lambda step, g: g * math.nan if step == 30 else g)
    loop(run, actor, 31)
    assert weights(run).isnan().any()


@pytest.mark.parametrize("actor", [SkipNonFinite(), ClipAtOneAndSkip()])
def test_nonfinite_loss_is_skipped(actor: InterventionRule) -> None:
    run = make_run()
    assert allowed(run, actor, 0.5)
    assert not allowed(run, actor, 0.5, math.inf)
    assert not allowed(run, actor, 0.5, math.nan)
    assert list(actor.acted) == [2, 3]


@pytest.mark.parametrize("actor", [ClipAtOne(), ClipAtOneAndSkip(), ZClip()])
def test_norm_above_one_is_clipped_to_one(actor: InterventionRule) -> None:
    run = make_run()
    for norm, expected_norm in ((0.5, 0.5), (1e4, 1.0), (1.5, 1.0), (0.9, 0.9)):
        assert allowed(run, actor, norm)
        assert norm_of(run) == pytest.approx(expected_norm, rel=1e-4)
    assert list(actor.acted) == [2, 3]


@pytest.mark.parametrize("actor", [SkipNonFinite(), SixSigmaSkip()])
def test_skip_rules_do_not_change_gradients(actor: InterventionRule) -> None:
    run = make_run()
    assert allowed(run, actor, 1e4)
    assert norm_of(run) == pytest.approx(1e4, rel=1e-4)
    assert list(actor.acted) == []


def test_six_sigma_skips_single_outliers() -> None:
    run, actor = make_run(), SixSigmaSkip()
    rng = random.Random(2)
    allowed_by_step = [allowed(run, actor, rng.uniform(0.9, 1.1)) for _ in range(140)]
    assert all(allowed_by_step)
    assert not allowed(run, actor, 50.0)
    assert allowed(run, actor, 1.0)
    assert not allowed(run, actor, 1.0, loss=99.0)
    assert list(actor.acted) == [141, 143]


def test_after_one_nan_six_sigma_skips_128_more() -> None:
    run, actor = make_run(), SixSigmaSkip()
    rng = random.Random(2)
    allowed_by_step = [allowed(run, actor, rng.uniform(0.9, 1.1), math.nan if k == 100 else 1.0) for k in range(300)]
    assert [k for k, fine in enumerate(allowed_by_step) if not fine] == list(range(100, 229))


def test_zclip_clips_an_outlier_towards_the_mean() -> None:
    run, actor = make_run(), ZClip(max_norm=math.inf)
    first = [0.4, 0.6] * 12 + [0.5]
    for norm in first:
        allowed(run, actor, norm)
    mean, deviation = 0.5, math.sqrt(24 * 0.01 / 25)
    z = (5.0 - mean) / (deviation + 1e-6)
    allowed(run, actor, 5.0)
    assert norm_of(run) == pytest.approx(mean + 6.25 * deviation / z, rel=1e-4)
    assert actor.norms.mean == pytest.approx(mean + 0.03 * 6.25 * deviation / z, rel=1e-4)
    allowed(run, actor, 0.7)
    assert norm_of(run) == pytest.approx(0.7, rel=1e-4)
    assert list(actor.acted) == [26]


def test_zclip_clips_larger_outliers_harder() -> None:
    expected_norm: list[float] = []
    for norm in (1.0, 2.0, 50.0):
        run, actor = make_run(), ZClip(max_norm=math.inf)
        for typical_norm in [0.4, 0.6] * 13:
            allowed(run, actor, typical_norm)
        allowed(run, actor, norm)
        expected_norm.append(norm_of(run))
    assert expected_norm == sorted(expected_norm, reverse=True)
    assert expected_norm[-1] == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("make", INTERVENTION_RULES)
def test_healthy_run_learns_under_every_rule(make: Callable[[], InterventionRule]) -> None:
    run, actor = make_run(steps=100), make()
    start = run.eval_loss()
    loop(run, actor, 100)
    assert run.eval_loss() < start

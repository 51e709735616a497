"""Detectors that need a single row: non-finite values, norm outliers, idle devices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from surefoot.judge.detectors.system import IdleDevice
from surefoot.judge.detectors.vetoes import NonFinite, NormOutlier
from surefoot.judge.signals import Signals
from surefoot.judge.thresholds import Thresholds
from surefoot.records import Pattern, StepMetrics, StepOverrides, Verdict

HEALTHY = StepMetrics(step=7, attempt=9, time=3.0, loss=2.0, norm=1.0, nonfinite=0.0)


@pytest.mark.parametrize("detector", [NonFinite(), NormOutlier(Signals(Thresholds())), IdleDevice(Thresholds())])
def test_healthy_row_gives_no_finding(detector: NonFinite | NormOutlier | IdleDevice) -> None:
    assert not detector.update(HEALTHY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": math.nan}, "the loss is nan"),
        ({"loss": math.inf}, "the loss is inf"),
        ({"nonfinite": 3.0, "norm": math.nan}, "3 gradient values are not finite"),
        ({"norm": math.inf}, "their norm overflows float32"),
    ],
)
def test_nonfinite_value_is_named(change: dict[str, float], words: str) -> None:
    (finding,) = NonFinite().update(replace(HEALTHY, verdict=Verdict.NONFINITE, **change))
    assert words in finding.detail
    assert finding.pattern is Pattern.NONFINITE
    assert (finding.step, finding.attempt, finding.time) == (7, 9, 3.0)
    assert set(finding.evidence) == {"loss", "norm", "nonfinite"}


def test_nonfinite_loss_and_gradients_are_both_named() -> None:
    (finding,) = NonFinite().update(replace(HEALTHY, verdict=Verdict.NONFINITE, loss=math.nan, nonfinite=8.0))
    assert "loss" in finding.detail
    assert "8 gradient" in finding.detail


def test_nonfinite_weights_are_found_although_the_update_was_applied() -> None:
    (finding,) = NonFinite().update(replace(HEALTHY, nonfinite_params=2.0))
    assert "2 values in weights or buffers" in finding.detail


def test_overflow_of_the_loss_scale_gives_no_finding() -> None:
    row = replace(HEALTHY, verdict=Verdict.OVERFLOW, nonfinite=4.0, norm=math.nan)
    assert not NonFinite().update(row)
    assert NormOutlier(Signals(Thresholds())).update(row) == ()


def test_source_of_a_nonfinite_value_is_named_where_known() -> None:
    bad = replace(HEALTHY, verdict=Verdict.NONFINITE, loss=math.nan)
    (finding,) = NonFinite().update(replace(bad, bad_microbatch=2, num_microbatches=4, rank=1))
    assert finding.evidence["bad_microbatch"] == 2
    assert finding.evidence["culprit_rank"] == 1
    (finding,) = NonFinite().update(replace(bad, bad_microbatch=0, num_microbatches=1))
    assert "bad_microbatch" not in finding.evidence, "with one micro-batch its index says nothing"


def test_norm_outlier_is_found_with_its_limit() -> None:
    row = replace(
        HEALTHY, verdict=Verdict.NORM_OUTLIER, norm=500.0, norm_limit=100.0, bad_microbatch=1, num_microbatches=2
    )
    (finding,) = NormOutlier(Signals(Thresholds())).update(row)
    assert finding.pattern is Pattern.JUMP
    assert "500" in finding.detail
    assert "5 times" in finding.detail
    assert finding.evidence == {"loss": 2.0, "norm": 500.0, "limit": 100.0, "bad_microbatch": 1}


def test_loss_above_its_ceiling_is_the_reason_when_the_norm_is_within_its_limit() -> None:
    normal = Signals(Thresholds())
    normal.overrides = StepOverrides(loss_ceiling=1.5)
    row = replace(HEALTHY, verdict=Verdict.NORM_OUTLIER, norm=3.475, norm_limit=81.75)
    (finding,) = NormOutlier(normal).update(row)
    assert "loss 2, above the ceiling of 1.5" in finding.detail
    assert "times the limit" not in finding.detail
    assert finding.evidence["ceiling"] == 1.5


def test_update_refused_because_of_another_optimizer_is_reported_as_such() -> None:
    row = replace(HEALTHY, verdict=Verdict.NORM_OUTLIER, norm=3.475, norm_limit=81.75)
    (finding,) = NormOutlier(Signals(Thresholds())).update(row)
    assert "another optimizer" in finding.detail


def every_second(row: StepMetrics, begin: int, seconds: int) -> list[StepMetrics]:
    return [replace(row, time=float(begin + s)) for s in range(seconds)]


def test_bottleneck_is_found_once_and_again_after_recovery() -> None:
    detector, long = IdleDevice(Thresholds()), int(Thresholds().idle_seconds)
    idle = replace(HEALTHY, utilisation=0.3, memory_reserved=1e9, seconds=1.0, data_wait=0.1)
    num_findings = [len(detector.update(row)) for row in every_second(idle, 0, 3 * long)]
    assert num_findings.index(1) == long
    assert sum(num_findings) == 1
    assert not detector.update(HEALTHY), "a row without a reading changes nothing"
    detector.update(replace(idle, time=3.0 * long, utilisation=Thresholds().idle_utilisation))
    assert sum(len(detector.update(row)) for row in every_second(idle, 3 * long + 1, long)) == 0
    assert sum(len(detector.update(row)) for row in every_second(idle, 4 * long + 1, 2)) == 1


@pytest.mark.parametrize(("wait", "word"), [(0.5, "data"), (0.01, "launches"), (math.nan, "launches")])
def test_bottleneck_has_a_reason(wait: float, word: str) -> None:
    detector = IdleDevice(Thresholds())
    row = replace(HEALTHY, utilisation=0.3, memory_reserved=1e9, seconds=1.0, data_wait=wait)
    findings = [f for later in every_second(row, 0, int(Thresholds().idle_seconds) + 1) for f in detector.update(later)]
    assert word in findings[0].detail

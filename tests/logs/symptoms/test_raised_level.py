"""A loss that jumped and stays far above its earlier level is not healthy, at any later row."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.run_curves import RunCurves, Series
from surefoot.logs.symptoms import raised_level
from surefoot.logs.symptoms.symptom import RunView
from surefoot.records import Pattern

Losses = NDArray[np.float64]


def fall(count: int, noise: float = 0.03, seed: int = 0) -> Losses:
    """A loss that decreases from 10 to 2.2."""
    chance = np.random.default_rng(seed)
    return (2.2 + 7.8 * np.exp(-np.arange(count) / (count / 6))) * np.exp(noise * chance.standard_normal(count))


def view_of(losses: Losses) -> RunView:
    return RunView(RunCurves(loss=Series("loss", np.arange(len(losses), dtype=float), losses)))


def with_jump(count: int, after: int, to: float, noise: float = 0.03) -> Losses:
    """The same, then a jump to 11 and a decay to the level `to`."""
    chance = np.random.default_rng(1)
    tail = (to + (11 - to) * np.exp(-np.arange(after) / 30)) * np.exp(noise * chance.standard_normal(after))
    return np.concatenate([fall(count, noise), tail])


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("after", [12, 72, 100, 400, 1000])
@pytest.mark.parametrize("count", [60, 300, 1000, 5000, 20_000])
def test_lasting_jump_is_a_failure(count: int, after: int, noise: float) -> None:
    diagnosis = diagnose(with_jump(count, after, 6.5, noise).tolist())
    assert diagnosis.verdict == "failed"
    assert diagnosis.pattern is Pattern.JUMP
    assert diagnosis.onset_step == pytest.approx(count, abs=max(5, count // 1000))


def test_jump_does_not_become_its_own_baseline() -> None:
    losses = with_jump(1000, 600, 6.5)
    verdicts = {str(diagnose(losses[:end].tolist()).verdict) for end in range(1012, 1600, 37)}
    assert verdicts == {"failed"}


@pytest.mark.parametrize("count", [100, 1000, 5000])
def test_partial_recovery_is_not_reported_as_recovery(count: int) -> None:
    diagnosis = diagnose(with_jump(count, 400, 3.6).tolist())
    assert diagnosis.verdict == "warning"
    assert diagnosis.pattern is not Pattern.RECOVERED_SPIKE
    assert not any("came back" in note for note in diagnosis.notes)
    assert any("above the level before" in line for line in diagnosis.causes[0].evidence)


@pytest.mark.parametrize("count", [100, 1000, 5000])
@pytest.mark.parametrize("to", [1.8, 2.2])
def test_recovered_loss_has_not_failed(count: int, to: float) -> None:
    diagnosis = diagnose(with_jump(count, 300, to).tolist())
    assert diagnosis.verdict != "failed"
    assert diagnosis.pattern in (Pattern.NONE, Pattern.RECOVERED_SPIKE)


def test_warm_restart_that_recovered_before_is_only_a_warning() -> None:
    cycles = np.tile(1 + 4 * np.exp(-np.arange(200) / 40), 5)[:820]
    losses = fall(820) * np.where(np.arange(820) < 200, 1.0, cycles)
    sign = raised_level.find_raised_level(view_of(losses))
    assert sign is not None
    assert sign.verdict == "warning"
    assert sign.onset == 800


@pytest.mark.parametrize("seed", range(20))
def test_heavy_tails_and_waves_are_no_jumps(seed: int) -> None:
    chance = np.random.default_rng(seed)
    heavy = fall(600, 0.0) * np.exp(0.15 * np.clip(chance.standard_t(2.5, 600), -8, 8))
    often = fall(600, 0.05) * np.where(chance.random(600) < 0.15, 3.0, 1.0)
    waves = fall(600, 0.02) * (1 + 0.6 * np.sin(np.arange(600) / 9))
    for losses in (heavy, often, waves):
        assert raised_level.find_raised_level(view_of(losses)) is None


def verdicts_of_prefixes(losses: Losses, first: int) -> set[str]:
    """Verdicts of every prefix from `first` rows on."""
    return {str(diagnose(losses[:end].tolist()).verdict) for end in range(first, len(losses) + 1)}


def test_no_prefix_is_healthy_while_the_loss_is_above_its_level() -> None:
    losses = with_jump(400, 160, 6.5)
    assert "healthy" not in verdicts_of_prefixes(losses, 406)


def test_small_lasting_jump_is_a_warning_at_its_row() -> None:
    losses = fall(6000, 0.02)
    losses[4321:] *= 1.2
    diagnosis = diagnose(losses.tolist())
    assert (diagnosis.verdict, diagnosis.pattern, diagnosis.onset_step) == (
        "warning",
        "jump",
        4322,
    )  # points count from 1


@pytest.mark.parametrize("rows", [4000, 40_000])
def test_slow_rise_is_a_warning(rows: int) -> None:
    losses = fall(rows, 0.03)
    losses[rows // 2 :] *= 1 + 0.2 * np.linspace(0, 1, rows - rows // 2)  # ends 6.6 % above its lowest
    diagnosis = diagnose(losses.tolist())
    assert diagnosis.verdict == "warning"
    assert "risen" in diagnosis.sentence


def test_loss_back_at_guessing_level_is_a_failure() -> None:
    chance = np.random.default_rng(3)
    losses = np.log(10) * (0.75 + 0.25 * np.exp(-np.arange(900) / 80)) * np.exp(chance.normal(0, 0.01, 900))
    losses[700:] = np.log(10) * np.exp(chance.normal(0, 0.003, 200))
    diagnosis = diagnose(losses.tolist())
    assert (diagnosis.verdict, diagnosis.onset_step) == ("failed", 701)
    assert any("logarithm of 10" in line for line in diagnosis.causes[0].evidence)


def test_loss_stuck_far_above_its_start_is_a_failure() -> None:
    losses = np.random.default_rng(0).normal(90.0, 3.0, 2000)
    losses[:12] = 2.3
    diagnosis = diagnose(losses.tolist())
    assert diagnosis.verdict == "failed"
    assert diagnosis.onset_step == 13


def test_new_data_that_is_learned_has_not_failed() -> None:
    losses = fall(4000, 0.03)
    after = np.arange(3000)
    losses[1000:] *= 1 + 1.2 * np.exp(-after / 300) - 0.1 * (1 - np.exp(-after / 300))
    verdicts = [str(diagnose(losses[:end].tolist()).verdict) for end in range(1010, 4001, 130)]
    assert "failed" not in verdicts
    assert verdicts[0] == "warning"
    assert verdicts[-1] == "healthy"

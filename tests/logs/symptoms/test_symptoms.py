"""Every failure pattern is found in synthetic curves of any scale, length and noise; healthy curves stay healthy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from made import Course, learning

from surefoot.logs.diagnose_log import diagnose

many = settings(max_examples=60)


def verdict_and_pattern(numbers: object) -> tuple[str, str]:
    diagnosis = diagnose(numbers)
    return str(diagnosis.verdict), str(diagnosis.pattern)


@many
@given(learning(noise=(0.005, 0.02, 0.05, 0.1)))
def test_decreasing_loss_is_healthy(course: Course) -> None:
    assert verdict_and_pattern(course.logged()) == ("healthy", "none")


@many
@given(learning(least=100, noise=(0.2, 0.4)))  # 40 values are too few at this noise
def test_noisy_decreasing_loss_has_not_failed(course: Course) -> None:
    assert verdict_and_pattern(course.logged())[0] != "failed"


@many
@given(learning())
def test_lasting_nan(course: Course) -> None:
    loss = course.loss.copy()
    at = int(course.chance.integers(5, len(loss) - 4))
    loss[at:] = np.nan
    diagnosis = diagnose(course.logged(loss))
    assert (str(diagnosis.verdict), str(diagnosis.pattern)) == ("failed", "nonfinite")
    assert diagnosis.onset_step == at * 10


@many
@given(learning())
def test_lasting_jump(course: Course) -> None:
    loss = course.loss.copy()
    count = len(loss)
    at = int(course.chance.integers(count // 2, count - count // 5))
    loss[at:] = loss[at] * course.chance.uniform(5, 100) * np.exp(course.chance.normal(0, 0.05, count - at))
    diagnosis = diagnose(course.logged(loss))
    assert (str(diagnosis.verdict), str(diagnosis.pattern)) == ("failed", "jump")
    assert diagnosis.onset_step is not None
    assert abs(diagnosis.onset_step / 10 - at) <= 2 + count / 500


@many
@given(learning())
def test_growth(course: Course) -> None:
    count = len(course.loss)
    begin = int(course.chance.uniform(0, 0.5) * count)
    late = np.clip((np.arange(count) - begin) / (count - begin), 0, None)
    grown = course.loss * np.exp(np.log(course.chance.uniform(50, 1000)) * late)
    assert verdict_and_pattern(course.logged(grown)) == ("failed", "exponential")


@many
@given(learning())
def test_recovered_spike(course: Course) -> None:
    loss = course.loss.copy()
    at = int(course.chance.integers(len(loss) // 5, len(loss) - len(loss) // 4))
    loss[at] *= course.chance.uniform(8, 1000)
    diagnosis = diagnose(course.logged(loss))
    assert (str(diagnosis.verdict), str(diagnosis.pattern)) == ("warning", "recovered_spike")


@many
@given(learning())
def test_plateau(course: Course) -> None:
    flat = course.loss[0] * np.exp(course.chance.normal(0, 0.01, len(course.loss)))
    assert verdict_and_pattern(course.logged(flat)) == ("warning", "plateau")


@many
@given(learning())
def test_overfitting(course: Course) -> None:
    count = len(course.loss)
    eval_loss = course.loss.copy()
    at = count // 3
    eval_loss[at:] = eval_loss[at] * np.linspace(1, course.chance.uniform(1.8, 6), count - at)
    eval_loss *= np.exp(course.chance.normal(0, 0.02, count))
    assert verdict_and_pattern(course.logged(eval_loss=eval_loss)) == ("warning", "overfit")


@many
@given(learning())
def test_eval_loss_that_follows_training_is_no_overfitting(course: Course) -> None:
    eval_loss = (1.1 * course.loss + 0.1 * course.loss[0]) * np.exp(course.chance.normal(0, 0.01, len(course.loss)))
    assert verdict_and_pattern(course.logged(eval_loss=eval_loss)) == ("healthy", "none")


@many
@given(learning())
def test_loss_of_zero_with_nan_norm_is_a_failure(course: Course) -> None:
    loss = course.loss.copy()
    norm = np.full(len(loss), 1.0)
    at = len(loss) // 2
    loss[at:], norm[at:] = 0.0, np.nan
    diagnosis = diagnose(course.logged(loss, grad_norm=norm))
    assert (str(diagnosis.verdict), str(diagnosis.pattern)) == ("failed", "collapse_to_zero")
    assert "NaN" in diagnosis.sentence
    assert diagnosis.onset_step == at * 10


@pytest.mark.parametrize(
    ("losses", "pattern"),
    [
        ([2.1, 2.0, 1.9, 8734.5, np.nan], "jump"),
        ([2.1, 2.3, 2.8, 4.5, 12.3, 89.7, np.nan], "exponential"),
        ([2.1, 1.8, 2.5, 1.6, 3.2, 1.4, 5.8, np.nan], "oscillating"),
        ([1.8, 1.7, 1.6, 1.5, 1.4, 87234.5, np.nan], "jump"),
        ([2.1, 2.2, 2.5, 3.1, 4.8, 9.2, 23.5, 156.7, np.nan], "exponential"),
        ([2.0, 1.8, 2.2, 1.6, 2.5, 1.4, 3.2, 1.2, 5.8, np.nan], "oscillating"),
    ],
)
def test_pattern_before_a_nan(losses: list[float], pattern: str) -> None:
    assert verdict_and_pattern(losses) == ("failed", pattern)
    assert verdict_and_pattern(losses[:-1]) == ("failed", pattern), "also without the NaN"


def test_spike_long_before_a_nan_is_not_its_cause() -> None:
    assert verdict_and_pattern([0.7, 3.6, 0.63, 0.58, 0.54, 0.51, 0.48, np.nan, np.nan]) == ("failed", "nonfinite")


def test_loss_that_was_always_nan() -> None:
    diagnosis = diagnose([np.nan] * 10)
    assert (diagnosis.verdict, diagnosis.pattern, diagnosis.onset_step) == ("failed", "nonfinite", 1)


def test_eval_loss_that_was_always_nan() -> None:
    losses = np.linspace(6, 5, 50)
    diagnosis = diagnose({"loss": losses, "eval_loss": [None] * 49 + [np.nan]})
    assert (str(diagnosis.verdict), str(diagnosis.pattern)) == ("failed", "nonfinite")
    assert "evaluation" in diagnosis.sentence


def test_recovered_nan_is_a_warning() -> None:
    losses = np.linspace(3, 1, 200)
    losses[50] = np.nan
    assert verdict_and_pattern(losses) == ("warning", "recovered_spike")


def test_one_infinite_norm_at_a_float16_start_is_normal() -> None:
    norm = np.ones(50)
    norm[0] = np.inf
    assert verdict_and_pattern({"loss": np.linspace(3, 1, 50), "grad_norm": norm}) == ("healthy", "none")


def test_norm_of_all_zeros_is_ignored() -> None:
    assert verdict_and_pattern({"loss": np.linspace(3, 1, 50), "grad_norm": np.zeros(50)}) == ("healthy", "none")


def test_all_labels_masked() -> None:
    diagnosis = diagnose({"step": range(20), "loss": [0.0] * 20, "grad_norm": [0.0] * 20})
    assert (diagnosis.verdict, diagnosis.pattern) == ("failed", "collapse_to_zero")
    assert diagnosis.causes[0].cause == "labels"


def test_loss_that_decreases_to_zero_is_healthy() -> None:
    losses = np.round(2 * np.exp(-np.arange(100) / 8.0), 4)
    assert losses[-1] == 0
    assert verdict_and_pattern(losses)[0] == "healthy"


def test_losses_of_reinforcement_learning_need_not_fall() -> None:
    chance = np.random.default_rng(0)
    losses = np.where(chance.random(300) < 0.8, 0.0, chance.normal(0, 6e-4, 300))
    assert (
        verdict_and_pattern({"loss": losses, "grad_norm": np.ones(300), "reward": np.linspace(0, 1, 300)})[0]
        == "healthy"
    )


def test_loss_at_the_logarithm_of_ten_is_guessing() -> None:
    diagnosis = diagnose({"loss": np.full(50, np.log(10))})
    assert (diagnosis.verdict, diagnosis.pattern) == ("warning", "plateau")
    assert any("10 classes" in line for line in diagnosis.causes[0].evidence)


def test_lr_of_zero() -> None:
    diagnosis = diagnose({"loss": np.full(50, 3.3) + np.tile([0.0, 0.01], 25), "lr": np.zeros(50)})
    assert diagnosis.verdict == "warning"
    assert diagnosis.causes[0].cause == "not_updating"


def test_loss_scale_that_keeps_halving_is_a_warning() -> None:
    scale = 65536.0 * 0.5 ** np.minimum(np.arange(60) // 5, 8)
    diagnosis = diagnose({"loss": np.linspace(4, 2, 60), "loss scale": scale})
    assert (diagnosis.verdict, diagnosis.pattern) == ("warning", "overflow_skips")
    assert diagnosis.causes[0].cause == "precision_overflow"


def test_loss_scale_that_halves_occasionally_is_normal() -> None:
    scale = np.tile(np.repeat([1024.0, 2048.0], 50), 5)
    assert verdict_and_pattern({"loss": np.linspace(4, 2, 500), "loss_scale": scale}) == ("healthy", "none")


def test_norm_at_the_clip_threshold_is_noted() -> None:
    norm = np.where(np.arange(100) % 10 == 0, 0.8, 1.0)
    diagnosis = diagnose({"loss": np.linspace(4, 2, 100), "grad_norm": norm})
    assert diagnosis.verdict == "healthy"
    assert any("clipping" in note for note in diagnosis.notes)


def test_winning_discriminator_is_a_warning() -> None:
    game = {"G_loss": np.linspace(0.7, 3.0, 100), "D_loss": np.linspace(1.4, 0.1, 100)}
    diagnosis = diagnose(game)
    assert diagnosis.verdict == "warning"
    assert "discriminator" in diagnosis.sentence


def test_negative_losses() -> None:
    chance = np.random.default_rng(1)
    assert verdict_and_pattern(-np.linspace(0.3, 2.0, 100) + chance.normal(0, 0.02, 100)) == ("healthy", "none")


def test_slowly_rising_loss_is_a_warning() -> None:
    losses = np.concatenate([np.linspace(5, 1, 30), np.linspace(1, 1.25, 90)])
    diagnosis = diagnose(losses)
    assert diagnosis.verdict == "warning"
    assert "risen" in diagnosis.sentence


def test_recovered_nan_evaluations_are_a_warning() -> None:
    evals = np.linspace(3, 2, 20)
    evals[8:11] = np.nan
    losses = np.linspace(3, 1, 200)
    diagnosis = diagnose({"loss": losses, "eval_loss": [evals[n // 10] if n % 10 == 9 else None for n in range(200)]})
    assert (str(diagnosis.verdict), str(diagnosis.pattern)) == ("warning", "recovered_spike")
    assert "evaluation" in diagnosis.sentence


def test_infinite_first_evaluation_is_normal() -> None:
    evals = np.linspace(3, 2, 20)
    evals[0] = np.inf
    losses = np.linspace(3, 1, 200)
    diagnosis = diagnose({"loss": losses, "eval_loss": [evals[n // 10] if n % 10 == 9 else None for n in range(200)]})
    assert str(diagnosis.verdict) == "healthy"


def test_overfitting_long_before_divergence_is_reported_first() -> None:
    train = np.concatenate([np.geomspace(1, 0.1, 40), np.geomspace(0.1, 2, 20)])
    evals = np.concatenate([np.geomspace(1.2, 0.9, 10), np.geomspace(0.9, 30, 50)])
    diagnosis = diagnose({"loss": train, "eval_loss": evals})
    assert (str(diagnosis.verdict), str(diagnosis.pattern)) == ("failed", "overfit")
    assert any(note.startswith("also: ") for note in diagnosis.notes)

"""Every shape of trouble is told from made-up courses of any scale, length and noise; healthy ones are left alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from made import Course, learning

from surefoot.logs.diagnose_log import diagnose

many = settings(max_examples=60)


def told(numbers: object) -> tuple[str, str]:
    answer = diagnose(numbers)
    return str(answer.verdict), str(answer.pattern)


@many
@given(learning(noise=(0.005, 0.02, 0.05, 0.1)))
def test_a_run_that_learns_is_healthy(course: Course) -> None:
    assert told(course.logged()) == ("healthy", "none")


@many
@given(learning(least=100, noise=(0.2, 0.4)))  # forty values with such noise can look like anything
def test_a_noisy_run_that_learns_has_not_failed(course: Course) -> None:
    assert told(course.logged())[0] != "failed"


@many
@given(learning())
def test_nan_that_stays(course: Course) -> None:
    loss = course.loss.copy()
    at = int(course.chance.integers(5, len(loss) - 4))
    loss[at:] = np.nan
    answer = diagnose(course.logged(loss))
    assert (str(answer.verdict), str(answer.pattern)) == ("failed", "nonfinite")
    assert answer.onset_step == at * 10


@many
@given(learning())
def test_a_jump_that_stays(course: Course) -> None:
    loss = course.loss.copy()
    count = len(loss)
    at = int(course.chance.integers(count // 2, count - count // 5))
    loss[at:] = loss[at] * course.chance.uniform(5, 100) * np.exp(course.chance.normal(0, 0.05, count - at))
    answer = diagnose(course.logged(loss))
    assert (str(answer.verdict), str(answer.pattern)) == ("failed", "jump")
    assert answer.onset_step is not None
    assert abs(answer.onset_step / 10 - at) <= 2 + count / 500


@many
@given(learning())
def test_growth(course: Course) -> None:
    count = len(course.loss)
    begin = int(course.chance.uniform(0, 0.5) * count)
    late = np.clip((np.arange(count) - begin) / (count - begin), 0, None)
    grown = course.loss * np.exp(np.log(course.chance.uniform(50, 1000)) * late)
    assert told(course.logged(grown)) == ("failed", "exponential")


@many
@given(learning())
def test_a_spike_that_came_back(course: Course) -> None:
    loss = course.loss.copy()
    at = int(course.chance.integers(len(loss) // 5, len(loss) - len(loss) // 4))
    loss[at] *= course.chance.uniform(8, 1000)
    answer = diagnose(course.logged(loss))
    assert (str(answer.verdict), str(answer.pattern)) == ("warning", "recovered_spike")


@many
@given(learning())
def test_no_learning(course: Course) -> None:
    flat = course.loss[0] * np.exp(course.chance.normal(0, 0.01, len(course.loss)))
    assert told(course.logged(flat)) == ("warning", "plateau")


@many
@given(learning())
def test_overfitting(course: Course) -> None:
    count = len(course.loss)
    held = course.loss.copy()
    at = count // 3
    held[at:] = held[at] * np.linspace(1, course.chance.uniform(1.8, 6), count - at)
    held *= np.exp(course.chance.normal(0, 0.02, count))
    assert told(course.logged(eval_loss=held)) == ("warning", "overfit")


@many
@given(learning())
def test_an_evaluation_that_follows_is_no_overfitting(course: Course) -> None:
    held = (1.1 * course.loss + 0.1 * course.loss[0]) * np.exp(course.chance.normal(0, 0.01, len(course.loss)))
    assert told(course.logged(eval_loss=held)) == ("healthy", "none")


@many
@given(learning())
def test_a_filtered_nan_is_no_success(course: Course) -> None:
    loss = course.loss.copy()
    norm = np.full(len(loss), 1.0)
    at = len(loss) // 2
    loss[at:], norm[at:] = 0.0, np.nan
    answer = diagnose(course.logged(loss, grad_norm=norm))
    assert (str(answer.verdict), str(answer.pattern)) == ("failed", "collapse_to_zero")
    assert "NaN" in answer.sentence
    assert answer.onset_step == at * 10


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
def test_the_shape_before_a_nan(losses: list[float], pattern: str) -> None:
    assert told(losses) == ("failed", pattern)
    assert told(losses[:-1]) == ("failed", pattern), "and without the NaN"


def test_a_spike_long_before_the_nan_is_not_what_led_there() -> None:
    assert told([0.7, 3.6, 0.63, 0.58, 0.54, 0.51, 0.48, np.nan, np.nan]) == ("failed", "nonfinite")


def test_a_loss_that_was_always_nan() -> None:
    answer = diagnose([np.nan] * 10)
    assert (answer.verdict, answer.pattern, answer.onset_step) == ("failed", "nonfinite", 1)


def test_an_evaluation_that_is_always_nan() -> None:
    losses = np.linspace(6, 5, 50)
    answer = diagnose({"loss": losses, "eval_loss": [None] * 49 + [np.nan]})
    assert (str(answer.verdict), str(answer.pattern)) == ("failed", "nonfinite")
    assert "evaluation" in answer.sentence


def test_a_nan_that_came_back_is_told_but_the_run_lives() -> None:
    losses = np.linspace(3, 1, 200)
    losses[50] = np.nan
    assert told(losses) == ("warning", "recovered_spike")


def test_one_infinite_norm_of_a_float16_start_is_normal() -> None:
    norm = np.ones(50)
    norm[0] = np.inf
    assert told({"loss": np.linspace(3, 1, 50), "grad_norm": norm}) == ("healthy", "none")


def test_a_norm_that_nobody_measured_says_nothing() -> None:
    assert told({"loss": np.linspace(3, 1, 50), "grad_norm": np.zeros(50)}) == ("healthy", "none")


def test_labels_that_are_all_masked() -> None:
    answer = diagnose({"step": range(20), "loss": [0.0] * 20, "grad_norm": [0.0] * 20})
    assert (answer.verdict, answer.pattern) == ("failed", "collapse_to_zero")
    assert answer.causes[0].cause == "labels"


def test_a_loss_that_reached_zero_by_itself_is_fine() -> None:
    losses = np.round(2 * np.exp(-np.arange(100) / 8.0), 4)
    assert losses[-1] == 0
    assert told(losses)[0] == "healthy"


def test_losses_of_reinforcement_learning_need_not_fall() -> None:
    chance = np.random.default_rng(0)
    losses = np.where(chance.random(300) < 0.8, 0.0, chance.normal(0, 6e-4, 300))
    assert told({"loss": losses, "grad_norm": np.ones(300), "reward": np.linspace(0, 1, 300)})[0] == "healthy"


def test_guessing_among_ten_classes() -> None:
    answer = diagnose({"loss": np.full(50, np.log(10))})
    assert (answer.verdict, answer.pattern) == ("warning", "plateau")
    assert any("10 classes" in line for line in answer.causes[0].evidence)


def test_a_rate_of_zero() -> None:
    answer = diagnose({"loss": np.full(50, 3.3) + np.tile([0.0, 0.01], 25), "lr": np.zeros(50)})
    assert answer.verdict == "warning"
    assert answer.causes[0].cause == "not_updating"


def test_a_scale_that_halves_again_and_again() -> None:
    scale = 65536.0 * 0.5 ** np.minimum(np.arange(60) // 5, 8)
    answer = diagnose({"loss": np.linspace(4, 2, 60), "loss scale": scale})
    assert (answer.verdict, answer.pattern) == ("warning", "overflow_skips")
    assert answer.causes[0].cause == "precision_overflow"


def test_a_scale_that_halves_once_in_a_while_is_how_it_works() -> None:
    scale = np.tile(np.repeat([1024.0, 2048.0], 50), 5)
    assert told({"loss": np.linspace(4, 2, 500), "loss_scale": scale}) == ("healthy", "none")


def test_a_norm_pinned_at_the_clip_threshold_is_noted() -> None:
    norm = np.where(np.arange(100) % 10 == 0, 0.8, 1.0)
    answer = diagnose({"loss": np.linspace(4, 2, 100), "grad_norm": norm})
    assert answer.verdict == "healthy"
    assert any("clipping" in note for note in answer.notes)


def test_a_discriminator_that_wins() -> None:
    game = {"G_loss": np.linspace(0.7, 3.0, 100), "D_loss": np.linspace(1.4, 0.1, 100)}
    answer = diagnose(game)
    assert answer.verdict == "warning"
    assert "discriminator" in answer.sentence


def test_losses_below_zero() -> None:
    chance = np.random.default_rng(1)
    assert told(-np.linspace(0.3, 2.0, 100) + chance.normal(0, 0.02, 100)) == ("healthy", "none")


def test_a_loss_that_creeps_up_again() -> None:
    losses = np.concatenate([np.linspace(5, 1, 30), np.linspace(1, 1.25, 90)])
    answer = diagnose(losses)
    assert answer.verdict == "warning"
    assert "risen" in answer.sentence


def test_evaluations_that_were_nan_for_a_while_are_told() -> None:
    evals = np.linspace(3, 2, 20)
    evals[8:11] = np.nan
    losses = np.linspace(3, 1, 200)
    answer = diagnose({"loss": losses, "eval_loss": [evals[n // 10] if n % 10 == 9 else None for n in range(200)]})
    assert (str(answer.verdict), str(answer.pattern)) == ("warning", "recovered_spike")
    assert "evaluation" in answer.sentence


def test_an_infinite_first_evaluation_is_normal() -> None:
    evals = np.linspace(3, 2, 20)
    evals[0] = np.inf
    losses = np.linspace(3, 1, 200)
    answer = diagnose({"loss": losses, "eval_loss": [evals[n // 10] if n % 10 == 9 else None for n in range(200)]})
    assert str(answer.verdict) == "healthy"


def test_a_run_that_overfitted_long_before_it_diverged_is_told_so_first() -> None:
    train = np.concatenate([np.geomspace(1, 0.1, 40), np.geomspace(0.1, 2, 20)])
    evals = np.concatenate([np.geomspace(1.2, 0.9, 10), np.geomspace(0.9, 30, 50)])
    answer = diagnose({"loss": train, "eval_loss": evals})
    assert (str(answer.verdict), str(answer.pattern)) == ("failed", "overfit")
    assert any(note.startswith("also: ") for note in answer.notes)

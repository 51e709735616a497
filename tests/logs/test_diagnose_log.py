"""One answer from whatever somebody has, as a contract that programs may rely on."""

from __future__ import annotations

import json

import numpy as np
import pytest

import surefoot
from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.log_diagnosis import UnreadableInput


def test_the_json_holds_what_is_promised() -> None:
    told = diagnose([2.1, 2.0, 1.9, 8734.5, np.nan]).as_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert {"verdict", "pattern", "onset_step", "last_step", "causes", "source", "notes"} <= set(told)
    assert told["source"]["format"] == "arrays"
    assert told["source"]["points"] == 5
    assert told["source"]["columns"] == {"loss": "loss"}
    assert set(told["causes"][0]) == {"cause", "confidence", "evidence", "advice"}
    assert told["causes"][0]["advice"]


@pytest.mark.parametrize("losses", [[], [1.0], [1.0, 0.9, 0.8]])
def test_too_few_losses_are_not_enough_to_tell(losses: list[float]) -> None:
    assert diagnose(losses).verdict == "unknown"


def test_a_log_without_a_loss_says_which_columns_there_are() -> None:
    answer = diagnose({"step": [1, 2, 3], "temperature": [20.0, 21.0, 22.0]})
    assert answer.verdict == "unknown"
    assert "temperature" in answer.sentence


@pytest.mark.parametrize(
    "wrong", [3, None, object(), {"loss": ["a", "b"]}, {"loss": [1, 2], "step": [1]}, [[1, 2], [3]]]
)
def test_what_is_no_log_gets_one_clear_message(wrong: object) -> None:
    with pytest.raises(UnreadableInput, match="Pass a path"):
        diagnose(wrong)


def test_records_and_tensors_and_missing_values() -> None:
    records = [
        {"step": i, "loss": 2 - 0.01 * i, "note": "text"} | ({"eval_loss": 1.5} if i % 10 == 0 else {})
        for i in range(50)
    ]
    answer = diagnose(records)
    assert answer.verdict == "healthy"
    assert answer.source["columns"] == {"loss": "loss", "eval_loss": "eval_loss"}
    sparse = {"loss": [3.0 - 0.02 * i for i in range(50)], "val_loss": [None if i % 5 else 2.0 for i in range(50)]}
    assert diagnose(sparse).verdict == "healthy"


def test_the_last_run_of_a_log_is_judged_and_a_failed_one_before_it_is_told() -> None:
    first = [2.0] * 10 + [np.nan] * 10
    second = list(np.linspace(2, 1, 40))
    answer = diagnose({"step": [*range(20), *range(40)], "loss": first + second})
    assert answer.verdict == "healthy"
    assert any("2 runs" in note for note in answer.notes)
    assert any("NaN" in note for note in answer.notes)


def test_a_file_and_the_numbers_in_it_give_the_same_answer(tmp_path) -> None:
    losses = [2.0 - 0.01 * i for i in range(30)] + [float("nan")] * 5
    file = tmp_path / "whatever"
    file.write_text("".join(json.dumps({"step": i, "loss": loss}) + "\n" for i, loss in enumerate(losses)))
    from_file, from_numbers = diagnose(file).as_json(), diagnose({"step": range(35), "loss": losses}).as_json()
    for told in (from_file, from_numbers):
        told["source"].pop("path"), told["source"].pop("format")
    assert from_file == from_numbers


def test_a_million_losses_are_judged(tmp_path) -> None:
    losses = 5 * np.exp(-np.arange(1_000_000) / 2e5) + 0.5
    losses[700_000:] = np.nan
    answer = diagnose({"loss": losses})
    assert (answer.verdict, answer.onset_step) == ("failed", 700_001)


def test_notebooks_have_it_at_the_top() -> None:
    assert surefoot.diagnose is diagnose


def test_the_judge_of_live_runs_is_asked_where_every_update_was_logged() -> None:
    chance = np.random.default_rng(0)
    steps = np.arange(400)
    late = np.clip(steps - 302, 0, 60)
    numbers = {
        "step": steps,
        "loss": (3 * np.exp(-steps / 200) + 0.5 + chance.normal(0, 0.03, 400)) * np.exp(0.15 * late),
        "grad_norm": (1 + 0.1 * chance.random(400)) * np.exp(0.2 * late),
        "lr": np.where(steps < 300, 1e-3, 1e-2),
    }
    answer = diagnose(numbers)
    assert (answer.verdict, answer.pattern) == ("failed", "exponential")
    assert answer.onset_step is not None
    assert 298 <= answer.onset_step <= 310
    assert answer.causes[0].cause == "learning_rate"
    assert any("10 times" in line for line in answer.causes[0].evidence)

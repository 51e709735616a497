"""`surefoot.diagnose` on any input, and the JSON fields that programs rely on."""

from __future__ import annotations

import json

import numpy as np
import pytest

import surefoot
from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.log_diagnosis import UnreadableInput


def test_json_fields() -> None:
    output = diagnose([2.1, 2.0, 1.9, 8734.5, np.nan]).as_json()
    assert json.loads(json.dumps(output, allow_nan=False)) == output
    assert {"verdict", "pattern", "onset_step", "last_step", "causes", "source", "notes"} <= set(output)
    assert output["source"]["format"] == "arrays"
    assert output["source"]["points"] == 5
    assert output["source"]["columns"] == {"loss": "loss"}
    assert set(output["causes"][0]) == {"cause", "confidence", "evidence", "advice"}
    assert output["causes"][0]["advice"]


@pytest.mark.parametrize("losses", [[], [1.0], [1.0, 0.9, 0.8]])
def test_too_few_losses_are_unknown(losses: list[float]) -> None:
    assert diagnose(losses).verdict == "unknown"


def test_log_without_a_loss_lists_its_columns() -> None:
    diagnosis = diagnose({"step": [1, 2, 3], "temperature": [20.0, 21.0, 22.0]})
    assert diagnosis.verdict == "unknown"
    assert "temperature" in diagnosis.sentence


@pytest.mark.parametrize(
    "wrong", [3, None, object(), {"loss": ["a", "b"]}, {"loss": [1, 2], "step": [1]}, [[1, 2], [3]]]
)
def test_invalid_input_gets_one_message(wrong: object) -> None:
    with pytest.raises(UnreadableInput, match="Pass a path"):
        diagnose(wrong)


def test_records_and_missing_values() -> None:
    records = [
        {"step": i, "loss": 2 - 0.01 * i, "note": "text"} | ({"eval_loss": 1.5} if i % 10 == 0 else {})
        for i in range(50)
    ]
    diagnosis = diagnose(records)
    assert diagnosis.verdict == "healthy"
    assert diagnosis.source["columns"] == {"loss": "loss", "eval_loss": "eval_loss"}
    sparse = {"loss": [3.0 - 0.02 * i for i in range(50)], "val_loss": [None if i % 5 else 2.0 for i in range(50)]}
    assert diagnose(sparse).verdict == "healthy"


def test_last_run_of_a_log_is_judged_and_an_earlier_failure_is_noted() -> None:
    first = [2.0] * 10 + [np.nan] * 10
    second = list(np.linspace(2, 1, 40))
    diagnosis = diagnose({"step": [*range(20), *range(40)], "loss": first + second})
    assert diagnosis.verdict == "healthy"
    assert any("2 runs" in note for note in diagnosis.notes)
    assert any("NaN" in note for note in diagnosis.notes)


def test_file_and_its_numbers_give_the_same_diagnosis(tmp_path) -> None:
    losses = [2.0 - 0.01 * i for i in range(30)] + [float("nan")] * 5
    file = tmp_path / "whatever"
    file.write_text("".join(json.dumps({"step": i, "loss": loss}) + "\n" for i, loss in enumerate(losses)))
    from_file, from_numbers = diagnose(file).as_json(), diagnose({"step": range(35), "loss": losses}).as_json()
    for output in (from_file, from_numbers):
        output["source"].pop("path"), output["source"].pop("format")
    assert from_file == from_numbers


def test_a_million_losses(tmp_path) -> None:
    losses = 5 * np.exp(-np.arange(1_000_000) / 2e5) + 0.5
    losses[700_000:] = np.nan
    diagnosis = diagnose({"loss": losses})
    assert (diagnosis.verdict, diagnosis.onset_step) == ("failed", 700_001)


def test_diagnose_is_a_top_level_name() -> None:
    assert surefoot.diagnose is diagnose


def test_live_judge_is_used_if_every_update_was_logged() -> None:
    chance = np.random.default_rng(0)
    steps = np.arange(400)
    late = np.clip(steps - 302, 0, 60)
    numbers = {
        "step": steps,
        "loss": (3 * np.exp(-steps / 200) + 0.5 + chance.normal(0, 0.03, 400)) * np.exp(0.15 * late),
        "grad_norm": (1 + 0.1 * chance.random(400)) * np.exp(0.2 * late),
        "lr": np.where(steps < 300, 1e-3, 1e-2),
    }
    diagnosis = diagnose(numbers)
    assert (diagnosis.verdict, diagnosis.pattern) == ("failed", "exponential")
    assert diagnosis.onset_step is not None
    assert 298 <= diagnosis.onset_step <= 310
    assert diagnosis.causes[0].cause == "learning_rate"
    assert any("10 times" in line for line in diagnosis.causes[0].evidence)

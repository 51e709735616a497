"""Comparison of two logs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_diagnoses import failed, healthy, made_curves

from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth
from surefoot.logs.report import comparison_page
from surefoot.logs.report.comparison import compare_logs
from surefoot.logs.run_curves import RunCurves, Series


def lower_from(point: int, factor: float, *, seed: int = 1) -> LogDiagnosis:
    """A healthy run with other noise, whose loss is multiplied by `factor` from a point on."""
    made = made_curves(seed=seed)
    values = made.loss.values.copy()
    values[point:] *= factor
    return healthy(curves=replace(made, loss=replace(made.loss, values=values)))


def test_sentence_names_the_lower_run_the_difference_and_the_divergence() -> None:
    comparison = compare_logs(healthy(), lower_from(250, 0.8))
    assert comparison.sentence.startswith("B is 20 % lower than A at step 4,990 (2.")
    assert comparison.diverged_at is not None
    assert 2400 <= comparison.diverged_at <= 2600


def test_runs_that_differ_by_noise_are_level() -> None:
    comparison = compare_logs(healthy(), lower_from(0, 1.0))
    assert comparison.sentence.startswith("A and B are level at step 4,990")
    assert comparison.diverged_at is None


def test_same_log_twice_is_level() -> None:
    comparison = compare_logs(healthy(), healthy())
    assert comparison.diverged_at is None
    assert "level" in comparison.sentence


def test_failed_run_is_compared_before_its_failure() -> None:
    comparison = compare_logs(failed(), healthy())
    assert comparison.compared_at is not None
    assert comparison.compared_at <= 4000
    assert comparison.sentence.endswith("A failed at 4,000.")
    assert comparison.is_trouble


def test_runs_of_other_lengths_and_spacing_are_aligned_by_step() -> None:
    made = made_curves(2000)  # four times the points over four times the steps
    every = Series("loss", made.loss.steps / 4, made.loss.values)
    comparison = compare_logs(healthy(), healthy(curves=replace(made, loss=every)))
    assert "level" in comparison.sentence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curves": None}, "B has no loss to compare"),
        ({"curves": replace(made_curves(), unit="epoch")}, "A counts in steps and B in epochs"),
        ({"curves": RunCurves(loss=Series("loss", np.arange(3) + 1e6, np.ones(3)))}, "A and B have no step in common"),
        ({"curves": RunCurves(loss=Series("loss", np.arange(3.0), np.full(3, np.nan)))}, "not one finite loss in B"),
    ],
)
def test_incomparable_runs_get_a_reason(changes: dict[str, object], message: str) -> None:
    comparison = compare_logs(healthy(), healthy(**changes))
    assert message in comparison.sentence
    assert comparison_page.as_text(comparison)
    assert comparison_page.as_html(comparison)


def test_settings_and_columns_that_differ_are_listed() -> None:
    first = healthy(source={"path": "a", "facts": {"fp16": 1.0, "seed": 1.0}, "columns": {"loss": "loss"}})
    second = healthy(source={"path": "b", "facts": {"fp16": 0.0, "seed": 1.0}, "columns": {"loss": "train_loss"}})
    assert compare_logs(first, second).settings == (("fp16", "1", "0"), ("column for loss", "loss", "train_loss"))


def test_page_starts_with_the_sentence_and_shows_both_runs() -> None:
    comparison = compare_logs(failed(), healthy())
    for width in (60, 80, 200):
        page = comparison_page.as_text(comparison, width=width)
        assert max(len(line) for line in page.splitlines()) <= width
        assert "● B" in page
        assert "bad.jsonl" in page
    assert comparison_page.as_text(comparison, width=200).splitlines()[0] == comparison.sentence


def test_json_plot_and_html_of_a_comparison(tmp_path: Path) -> None:
    comparison = compare_logs(failed(), healthy())
    output = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert output["a"]["verdict"] == "failed"
    assert output["b"]["verdict"] == "healthy"
    assert output["sentence"] == comparison.sentence
    comparison_page.draw(comparison, tmp_path / "both.png")
    comparison_page.write(comparison, tmp_path / "both.html")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert "A: train/loss" in (tmp_path / "both.html").read_text(encoding="utf-8")


numbers = st.lists(st.tuples(st.floats(), st.floats()), max_size=30)


@given(numbers, numbers)
def test_any_two_runs_can_be_compared(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    diagnoses = [
        LogDiagnosis(
            verdict=RunHealth.UNKNOWN,
            sentence="made up",
            curves=RunCurves(loss=Series("loss", *np.array(points, dtype=float).reshape(-1, 2).T)),
        )
        for points in (first, second)
    ]
    comparison = compare_logs(*diagnoses)
    json.dumps(comparison.as_json(), allow_nan=False)
    assert comparison.sentence.endswith(".")
    assert comparison_page.as_text(comparison)

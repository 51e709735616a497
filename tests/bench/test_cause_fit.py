"""The fit of the cause table: it learns from cases, stays near the table where they say nothing, and reads journals."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cause_fit import TYPED, Case, case_of, confidences_in_use, fit, leading_cause, named, table
from benchmarks.zoo.jobs import all_scenarios
from surefoot.judge import cause_confidences
from surefoot.judge.rank_causes import CLUES
from surefoot.records import Cause

GOLDEN = Path(__file__).parent / "golden"


def position(cause: Cause, number: int = 1) -> int:
    return list(named(TYPED)).index(f"{cause.value}.{number}")


DRIFT, LABELS, DAMAGED = position(Cause.DRIFT), position(Cause.LABELS), position(Cause.WEIGHTS_DAMAGED)


def mistaken(right: Cause) -> list[Case]:
    return [Case(f"run-{k}", "fault", frozenset({right}), (DRIFT, LABELS)) for k in range(10)]


def test_the_fit_learns_from_mistakes_and_moves_nothing_else() -> None:
    assert TYPED[DRIFT] > TYPED[LABELS]
    cases = mistaken(Cause.LABELS)
    fitted = fit(cases, 0.01)
    assert leading_cause(cases[0], TYPED) is Cause.DRIFT
    assert leading_cause(cases[0], fitted) is Cause.LABELS
    assert fitted[DAMAGED] == pytest.approx(TYPED[DAMAGED], abs=1e-3)
    assert fit(cases, 0.01) == fitted, "the same cases give the same table"


def test_a_strong_penalty_stays_closer_to_what_is_typed() -> None:
    assert fit(mistaken(Cause.LABELS), 1.9)[DRIFT] > fit(mistaken(Cause.LABELS), 0.01)[DRIFT]


def test_a_cause_that_no_clue_speaks_for_teaches_nothing() -> None:
    assert fit(mistaken(Cause.MOMENTUM), 0.01) == pytest.approx(list(TYPED), abs=1e-3)


def test_a_case_is_read_from_a_recorded_run() -> None:
    name = "rate_too_high-decoder-brutal-11"
    case = case_of(GOLDEN / name, all_scenarios()[name])
    assert case is not None
    assert case.right == {Cause.LEARNING_RATE, *all_scenarios()[name].also_causes}
    assert leading_cause(case, confidences_in_use()) in case.right
    assert all(CLUES[clue].cause for clue in case.clues)


def test_the_table_in_the_package_is_one_that_the_fit_writes() -> None:
    """A new clue needs a new fit, or a line in that file."""
    assert list(cause_confidences.CONFIDENCES) == list(named(TYPED))
    assert table(confidences_in_use()) == Path(cause_confidences.__file__).read_text()
    assert max(confidences_in_use()) < 1.0


def test_a_healthy_run_is_no_case() -> None:
    name = "spike_that_heals-recurrent-11"
    case = case_of(GOLDEN / name, all_scenarios()[name])
    assert case is None or not case.right

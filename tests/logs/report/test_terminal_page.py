"""The report in the terminal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_diagnoses import failed, healthy, made_curves

from surefoot.logs.log_diagnosis import LogDiagnosis, RankedCause, RunHealth
from surefoot.logs.report.terminal_page import as_text, summary
from surefoot.logs.report.terminal_plot import PlotLine, plot_text
from surefoot.logs.run_curves import RunCurves, Series
from surefoot.records import Cause


def test_verdict_and_sentence_come_first_then_the_onset() -> None:
    lines = as_text(failed()).splitlines()
    assert lines[0] == "FAILED  The loss turned NaN at step 4,000 and stayed so."
    assert lines[1] == "Began at step 4,000 of 4,990, 80 % into the run."


def test_advice_is_numbered_without_repetition() -> None:
    page = as_text(failed())
    assert "1. Go back to a checkpoint before step 4,000." in page
    assert "2. Halve the learning rate." in page
    assert "3. Look at the batch of step 4,000." in page
    assert page.count("Halve the learning rate.") == 1


def test_last_line_names_the_source_and_skipped_lines() -> None:
    page = " ".join(as_text(failed()).split())
    assert "bad.jsonl · jsonl · 500 points" in page
    assert "norm = grad_norm" in page
    assert "skipped: 3 lines that are not JSON" in page


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_the_page_stays_short(width: int) -> None:
    lines = as_text(failed(), width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= (32 if width >= 80 else 45)


def test_plot_marks_the_onset_and_nonfinite_values() -> None:
    page = as_text(failed())
    strip = next(line for line in page.splitlines() if "NaN/Inf" in line)
    axis = next(line for line in page.splitlines() if "└" in line)
    assert "▲" in axis
    assert abs(strip.index("×") - axis.index("▲")) <= 1  # noqa: RUF001
    assert "● val/loss" in page


def test_healthy_run_has_no_onset_mark_and_no_advice() -> None:
    page = as_text(healthy())
    assert page.startswith("HEALTHY  ")
    assert "▲" not in page
    assert "What to do" not in page


def test_escape_codes_only_with_colours() -> None:
    assert "\x1b" not in as_text(failed())
    assert "\x1b[" in as_text(failed(), colour=True)


def test_ascii_terminal_gets_only_ascii() -> None:
    page = as_text(failed(), encoding="ascii")
    assert page.isascii()
    assert "^" in page
    assert "x" in next(line for line in page.splitlines() if "NaN/Inf" in line).split("NaN/Inf")[1]


def test_escape_sequences_of_a_log_are_removed() -> None:
    evil = "loss\x1b[2J\x1b]0;owned\x07\r\u202e"
    page = as_text(failed(sentence=evil, notes=(evil,), source={"path": evil, "columns": {"loss": evil}}))
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(page)


def test_square_brackets_and_colons_are_no_markup() -> None:
    assert "[red]loss[/red] :smile:" in as_text(failed(sentence="[red]loss[/red] :smile:"))


def test_loss_that_spans_decades_is_drawn_on_a_log_scale() -> None:
    assert "log scale" in "\n".join(
        line.plain
        for line in plot_text([PlotLine("loss", np.arange(5.0), np.array([2.0, 2.1, 50, 900, 1e6]))], width=60)
    )
    assert "log scale" not in as_text(healthy())


def test_evidence_shared_by_two_causes_is_shown_once() -> None:
    same = ("The loss doubled.",)
    causes = tuple(
        RankedCause(cause=cause, confidence=0.5, evidence=same, advice=()) for cause in (Cause.MOMENTUM, Cause.DRIFT)
    )
    assert as_text(failed(causes=causes)).count("The loss doubled.") == 1


def test_diagnosis_without_curves_is_shown() -> None:
    page = as_text(LogDiagnosis(verdict=RunHealth.UNKNOWN, sentence="Not enough to tell: 0 losses in this log."))
    assert page.strip() == "UNKNOWN  Not enough to tell: 0 losses in this log."


def test_several_logs_end_with_one_line_each() -> None:
    lines = summary([failed(), healthy()]).splitlines()
    assert lines[0] == "2 logs"
    assert lines[1].split()[0] == "FAILED"
    assert "bad.jsonl" in lines[1]
    assert "from 4,000" in lines[1]
    assert lines[2].split()[:2] == ["HEALTHY", "good.csv"]


def test_repr_is_the_page_and_html_repr_has_a_plot() -> None:
    assert repr(failed()).startswith("FAILED  The loss")
    assert "data:image/svg+xml;base64," in failed()._repr_html_()


def test_page_for_millions_of_points_is_short() -> None:
    assert len(as_text(healthy(curves=made_curves(1_000_000))).splitlines()) < 32


values = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40)


@given(values, values, st.integers(10, 200), st.booleans(), st.one_of(st.none(), st.floats()))
def test_any_numbers_can_be_plotted(
    losses: list[float], others: list[float], width: int, fine: bool, onset: float | None
) -> None:
    curves = [
        PlotLine(name, np.arange(len(part), dtype=float), np.array(part))
        for name, part in (("a", losses), ("b", others))
    ]
    drawn = plot_text(curves, width=width, onset=onset if onset is None or np.isfinite(onset) else None, unicode=fine)
    assert len(drawn) <= 13
    assert all(len(line.plain) <= max(width, 21) or "not a number" in line.plain for line in drawn[:-1])


@given(values, st.text(max_size=60), st.integers(0, 50))
def test_any_diagnosis_can_be_shown(losses: list[float], text: str, onset: int) -> None:
    made = RunCurves(loss=Series(text, np.arange(len(losses), dtype=float), np.array(losses)))
    diagnosis = replace(failed(), sentence=text, onset_step=onset, curves=made, notes=(text, text, text))
    assert as_text(diagnosis, encoding="ascii")
    assert diagnosis._repr_html_()

"""`surefoot bench zoo` on the command line: tables, cached results, bad usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.zoo.jobs import BARE, SUREFOOT, ZooJob, all_scenarios
from benchmarks.zoo.published_runs import PUBLISHED_RUNS, rows
from benchmarks.zoo.scenario import Scenario
from benchmarks.zoo.scoreboard import Selection, main
from benchmarks.zoo.scoreboard.scores import (
    DetectionScore,
    FalseAlarmScore,
    OutcomeScore,
    RuleReport,
    judge_published,
    with_gate_verdicts,
)
from benchmarks.zoo.scoreboard.tables import tables
from surefoot.records import StepMetrics, Verdict

ONLY = "poisoned_sample-autoencoder-brutal"
"""A small part of the zoo that runs fast."""


def run_surefoot(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "surefoot", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("zoo")
    return folder, run_surefoot("bench", "zoo", "--only", ONLY, "--json", "--page", "docs", cwd=folder)


def test_veto_cures_a_run_that_breaks_the_bare_loop(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, process = done
    assert process.returncode == 0, process.stderr
    scores = json.loads(process.stdout)
    assert scores["not_as_stated"] == []
    assert scores["acting"][BARE]["cured"]["all"]["share"] == 0.0
    assert scores["acting"][SUREFOOT]["cured"]["all"]["share"] == 1.0
    assert scores["acting"][SUREFOOT]["false_interventions"] == 0.0
    assert scores["looking"][SUREFOOT]["seen"]["brutal"] == {"runs": 1, "share": 1.0, "delay": 0.0, "cause_right": 1}
    assert scores["looking"]["NaN check"]["seen"]["brutal"]["share"] == 1.0


def test_page_is_written_with_its_plots(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = done
    page = (folder / "docs" / "zoo.md").read_text()
    assert "poisoned_sample" in page
    assert "Adding a scenario" in page
    for name in ("rules.png", "runs.png"):
        assert (folder / "docs" / "zoo" / name).read_bytes().startswith(b"\x89PNG")


def test_second_benchmark_uses_cached_results(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, first = done
    mtimes = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    deleted = next(path for path in mtimes if path.parent.name == SUREFOOT and path.name.startswith(ONLY))
    deleted.unlink()
    again = run_surefoot("bench", "zoo", "--only", ONLY, "--json", cwd=folder)
    assert again.stdout == first.stdout
    remade = {path for path in mtimes if path.stat().st_mtime_ns != mtimes[path]}
    run = deleted.with_suffix("")
    assert run / "run.json" in remade
    assert {path for path in remade if not path.is_relative_to(run)} == {deleted}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "holdout"], "--split holdout is unknown. Use tuning or report."),
        (["--only", "perpetuum"], "no scenario of the report split contains 'perpetuum'"),
    ],
)
def test_bad_usage_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    process = run_surefoot("bench", "zoo", *arguments, cwd=tmp_path)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert not list(tmp_path.iterdir())


def test_nan_on_one_of_two_ranks(tmp_path: Path) -> None:
    name = next(id for id in all_scenarios() if id.startswith("nan_on_one_rank") and "brutal" in id)
    bare = ZooJob(name, BARE, str(tmp_path)).run()
    protected = ZooJob(name, SUREFOOT, str(tmp_path)).run()
    assert bare.loss == float("inf")
    assert protected.loss < float("inf")
    assert protected.acted
    assert protected.acted[0] == all_scenarios()[name].onset


@pytest.mark.timeout(600)  # two minutes on an idle machine
def test_one_of_each_cause(tmp_path: Path) -> None:
    """The quick form of the benchmark: every cause once, at its most brutal, bare and under surefoot."""
    board = main(Selection(quick=True), folder=tmp_path, workers=2, progress=lambda *_: None)
    assert board.not_as_stated == []
    assert board.interventions[SUREFOOT].false_interventions.count == 0, "surefoot intervened in a healthy run"
    assert board.interventions[SUREFOOT].healthy_outcomes.share == 1.0
    bare, protected = board.interventions[BARE].outcomes["all"], board.interventions[SUREFOOT].outcomes["all"]
    assert protected.dead < bare.dead
    assert protected.share > bare.share
    assert "## Rules that intervene" in tables(board)


# -- scores of hand-made results


def fault_scenario() -> Scenario:
    return next(s for s in all_scenarios().values() if not s.healthy and s.onset == 150)


def test_alarm_before_the_onset_is_no_detection() -> None:
    score = DetectionScore()
    score.add(fault_scenario(), RuleReport((3, 149)))
    score.add(fault_scenario(), RuleReport((3, 154, 160)))
    assert (score.share, score.delay) == (0.5, 4)


def test_false_alarms_of_a_control_count_from_its_onset() -> None:
    score, control = (
        FalseAlarmScore(),
        next(s for s in all_scenarios().values() if s.healthy and s.onset == 150 and s.name != "twin"),
    )
    score.add(control, (10, 149, 150, 200))
    assert (score.steps, score.count, score.runs_disturbed) == (control.settings.steps - 150, 2, 1)
    score.add(control.twin, (10, 149))
    assert score.count == 4


def test_outcome_shares() -> None:
    outcomes = OutcomeScore()
    for ratio in (1.0, 1.04, 1.2, float("inf")):
        outcomes.add(ratio, stopped=ratio > 1.1)
    assert (outcomes.share, outcomes.dead, outcomes.stopped) == (0.5, 0.25, 2)


def test_published_rows_get_the_gates_verdicts() -> None:
    trace = next(t for t in PUBLISHED_RUNS if t.name == "translation_convolutions")
    verdicts = [row.verdict for row in with_gate_verdicts(rows(trace))]
    assert set(verdicts[:100]) == {Verdict.APPLIED}
    assert Verdict.NORM_OUTLIER in verdicts[100:]
    report = judge_published(
        [
            StepMetrics(
                step=0, attempt=0, time=0.0, loss=1.0, norm=float("nan"), nonfinite=1.0, verdict=Verdict.NONFINITE
            )
        ]
    )
    assert report.alarms == (0,)

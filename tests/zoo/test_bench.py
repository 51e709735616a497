"""`surefoot bench zoo` the way a user types it: the table, going on after a cut, what it says of bad words."""

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

ONE = "poisoned_sample-autoencoder-brutal"
"""A part of the zoo that is soon made."""


def surefoot(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "surefoot", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    home = tmp_path_factory.mktemp("zoo")
    return home, surefoot("bench", "zoo", "--only", ONE, "--json", "--page", "docs", cwd=home)


def test_the_veto_cures_what_the_bare_loop_dies_of(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, process = done
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["not_as_stated"] == []
    assert found["acting"][BARE]["cured"]["all"]["share"] == 0.0
    assert found["acting"][SUREFOOT]["cured"]["all"]["share"] == 1.0
    assert found["acting"][SUREFOOT]["false_interventions"] == 0.0
    assert found["looking"][SUREFOOT]["seen"]["brutal"] == {"runs": 1, "share": 1.0, "delay": 0.0, "cause_right": 1}
    assert found["looking"]["NaN check"]["seen"]["brutal"]["share"] == 1.0


def test_the_page_is_written_with_its_pictures(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    home, _ = done
    page = (home / "docs" / "zoo.md").read_text()
    assert "poisoned_sample" in page
    assert "Adding a scenario" in page
    for name in ("rules.png", "runs.png"):
        assert (home / "docs" / "zoo" / name).read_bytes().startswith(b"\x89PNG")


def test_a_second_bench_takes_what_the_first_has_made(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    home, first = done
    made = {path: path.stat().st_mtime_ns for path in home.rglob("*.json")}
    lost = next(path for path in made if path.parent.name == SUREFOOT and path.name.startswith(ONE))
    lost.unlink()
    again = surefoot("bench", "zoo", "--only", ONE, "--json", cwd=home)
    assert again.stdout == first.stdout
    remade = {path for path in made if path.stat().st_mtime_ns != made[path]}
    assert remade == {lost, lost.with_suffix("") / "run.json"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--split", "holdout"], "--split holdout is unknown. Use tuning or report."),
        (["--only", "perpetuum"], "no scenario of the report split contains 'perpetuum'"),
    ],
)
def test_bad_words_get_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    process = surefoot("bench", "zoo", *words, cwd=tmp_path)
    assert process.returncode == 2
    assert said in process.stderr
    assert "Traceback" not in process.stderr
    assert not list(tmp_path.iterdir())


def test_a_nan_on_one_of_two_processes(tmp_path: Path) -> None:
    name = next(id for id in all_scenarios() if id.startswith("nan_on_one_rank") and "brutal" in id)
    bare = ZooJob(name, BARE, str(tmp_path)).run()
    protected = ZooJob(name, SUREFOOT, str(tmp_path)).run()
    assert bare.loss == float("inf")
    assert protected.loss < float("inf")
    assert protected.acted
    assert protected.acted[0] == all_scenarios()[name].onset


@pytest.mark.timeout(600)  # two minutes where nothing else is at work
def test_one_of_each_cause(tmp_path: Path) -> None:
    """The short form of the whole bench: every cause once, at its most brutal, bare and under surefoot."""
    board = main(Selection(quick=True), folder=tmp_path, workers=2, progress=lambda *_: None)
    assert board.not_as_stated == []
    assert board.interventions[SUREFOOT].false_interventions.count == 0, "a healthy run was touched"
    assert board.interventions[SUREFOOT].healthy_outcomes.share == 1.0
    bare, protected = board.interventions[BARE].outcomes["all"], board.interventions[SUREFOOT].outcomes["all"]
    assert protected.dead < bare.dead
    assert protected.share > bare.share
    assert "## Rules that intervene" in tables(board)


# -- the figures themselves, on numbers made by hand


def one() -> Scenario:
    return next(s for s in all_scenarios().values() if not s.healthy and s.onset == 150)


def test_an_alarm_before_the_onset_sees_nothing() -> None:
    seen = DetectionScore()
    seen.add(one(), RuleReport((3, 149)))
    seen.add(one(), RuleReport((3, 154, 160)))
    assert (seen.share, seen.delay) == (0.5, 4)


def test_false_alarms_are_counted_where_a_control_differs_from_its_twin() -> None:
    score, control = (
        FalseAlarmScore(),
        next(s for s in all_scenarios().values() if s.healthy and s.onset == 150 and s.name != "twin"),
    )
    score.add(control, (10, 149, 150, 200))
    assert (score.steps, score.count, score.runs_disturbed) == (control.settings.steps - 150, 2, 1)
    score.add(control.twin, (10, 149))
    assert score.count == 4


def test_shares_of_endings() -> None:
    cured = OutcomeScore()
    for ratio in (1.0, 1.04, 1.2, float("inf")):
        cured.add(ratio, stopped=ratio > 1.1)
    assert (cured.share, cured.dead, cured.stopped) == (0.5, 0.25, 2)


def test_published_numbers_get_the_gates_verdict() -> None:
    trace = next(t for t in PUBLISHED_RUNS if t.name == "translation_convolutions")
    verdicts = [row.verdict for row in with_gate_verdicts(rows(trace))]
    assert set(verdicts[:100]) == {Verdict.APPLIED}
    assert Verdict.NORM_OUTLIER in verdicts[100:]
    look = judge_published(
        [
            StepMetrics(
                step=0, attempt=0, time=0.0, loss=1.0, norm=float("nan"), nonfinite=1.0, verdict=Verdict.NONFINITE
            )
        ]
    )
    assert look.alarms == (0,)

"""`surefoot watch` gives the answer of `surefoot.read(RUN).story` and `surefoot diagnose`, for real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surefoot
from surefoot.cli import app
from surefoot.journal import Journal
from surefoot.records import Action, Cause, Decision, Diagnosis, Finding, FindingKind
from surefoot.watch.live_run import LiveRun

from . import fault_run
from .conftest import append_rows


def asked(*arguments: object) -> dict[str, Any]:
    return json.loads(CliRunner().invoke(app, [*map(str, arguments), "--json"]).stdout)


@pytest.mark.parametrize(
    ("fault", "word", "health", "level"),
    [
        ("refused", "warning", "warning", "refused"),
        ("rewound", "warning", "warning", "acted"),
        ("stopped", "failed", "failed", "stopped"),
        ("killed", "killed", "warning", "refused"),
    ],
)
def test_watch_read_and_diagnose_give_one_answer(
    fault: str, word: str, health: str, level: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    if fault == "killed":
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, fault_run.__file__, run_dir, fault], env=environment, check=False)
        assert done.returncode < 0
    else:
        fault_run.train(run_dir, fault)
    story = surefoot.read(run_dir).story
    watched, diagnosed = asked("watch", run_dir), asked("diagnose", run_dir)
    main, told = story.main, diagnosed["story"]
    assert main is not None
    shown = watched["incidents"][watched["main"]]
    first = main.first_cause
    assert first is not None
    assert (watched["verdict"], watched["health"], shown["level"]) == (word, health, level)
    assert (story.verdict, story.health) == (told["verdict"], told["health"]) == (word, health)
    assert shown["step"] == main.step == diagnosed["onset_step"] == told["incidents"][told["main"]]["step"]
    causes = [shown["causes"][0], told["incidents"][told["main"]]["causes"][0]]
    assert causes[0] == causes[1]
    assert causes[0]["cause"] == first.cause
    assert causes[0]["evidence"] == list(first.evidence)
    if first.cause is not Cause.UNKNOWN:
        assert diagnosed["causes"][0]["cause"] == first.cause
    assert [i["outcome"] for i in watched["incidents"]] == [i.outcome for i in story.incidents if i.level != "reported"]
    assert f"{main.cause_text} at step {main.step}" in watched["sentence"]


def test_a_followed_run_has_the_story_of_one_that_is_read(open_run: Callable[..., Journal]) -> None:
    journal = open_run()
    run = LiveRun(journal.run_dir)
    losses: dict[int, float] = dict.fromkeys((20, 21, 22, 23, 290), float("nan"))
    for first in range(0, 320, 20):
        append_rows(journal, range(first, first + 20), loss=losses)
        for attempt in (at for at in (20, 21, 290) if at in range(first, first + 20)):
            place: dict[str, Any] = {"step": attempt, "attempt": attempt}
            journal.event(Finding(**place, detector=FindingKind.NONFINITE, detail="the loss is nan"))
            journal.event(Diagnosis(**place, cause=Cause.BAD_BATCH, confidence=0.9, detail="a batch", advice=()))
            journal.event(Decision(**place, action=Action.REFUSE, reason="the loss is nan"))
        assert journal.flush()
        run.refresh()
        assert run.verdict.story.incidents == surefoot.read(run.path).story.incidents
        assert run.verdict.health is surefoot.read(run.path).story.health
    assert [incident.refused for incident in run.verdict.incidents] == [4, 1]


def test_the_late_events_of_another_rank_take_their_place(open_run: Callable[..., Journal]) -> None:
    journal = open_run()
    append_rows(journal, range(100), loss={50: float("nan")})
    journal.event(Decision(step=50, attempt=50, action=Action.REFUSE, reason="the loss is nan"))
    assert journal.flush()
    run = LiveRun(journal.run_dir)
    event = {
        "kind": "finding",
        "detector": "nonfinite",
        "step": 49,
        "attempt": 49,
        "time": 1.0,
        "detail": "rank 1: nan",
    }
    (journal.run_dir / "events-rank1.jsonl").write_text(json.dumps(event) + "\n")
    run.refresh()
    (incident,) = run.verdict.incidents
    assert (incident.attempt, incident.what) == (49, "rank 1: nan")
    assert run.verdict.story.incidents == surefoot.read(run.path).story.incidents

"""Following a run: what is written is taken in, and what becomes of its process is told."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.journal import Journal
from surefoot.records import Action, Cause, Decision, Diagnosis, Finding, FindingKind, Note, Outcome
from surefoot.watch import run_state
from surefoot.watch.find_runs import NoRunFound, choose_target
from surefoot.watch.live_run import LiveRun
from surefoot.watch.run_state import RunState

from .conftest import append_rows

MakeRun = Callable[..., Path]
OpenRun = Callable[..., Journal]


def incident(attempt: int, *, helped: bool | None = None, action: Action = Action.REWIND) -> list[object]:
    place = {"step": attempt, "attempt": attempt}
    events: list[object] = [
        Finding(**place, detector=FindingKind.JUMP, detail="the loss is 9"),
        Diagnosis(**place, cause=Cause.LEARNING_RATE, confidence=0.9, detail="lr too high", advice=("Lower it.",)),
        Decision(**place, action=action, reason="the loss has risen"),
    ]
    if helped is not None:
        later = {"step": attempt + 20, "attempt": attempt + 20}
        events.append(Outcome(**later, action=action, helped=helped, detail="the loss is 1"))
    return events


def test_the_newest_run_below_a_folder_is_chosen(made_run: MakeRun, tmp_path: Path) -> None:
    for name in ("a/old", "b/c/new", "b/checkpoints/hidden"):
        made_run(name)
    for age, name in ((50, "a/old"), (10, "b/c/new")):
        for file in (tmp_path / name).rglob("*"):
            os.utime(file, (time.time() - age,) * 2)
    target = choose_target(tmp_path)
    assert target.first.path == tmp_path / "b/c/new"
    assert [run.name_in(target.folder) for run in target.runs] == ["b/c/new", "a/old"]
    assert choose_target(tmp_path / "a/old").first.path == tmp_path / "a/old"


@pytest.mark.parametrize(("name", "words"), [("none", "does not exist"), ("file", "diagnose"), ("empty", "no run in")])
def test_where_there_is_no_run_the_way_out_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoRunFound, match=words):
        choose_target(tmp_path / name)


def test_rows_and_events_are_followed(open_run: OpenRun) -> None:
    journal = open_run()
    run = LiveRun(journal.run_dir)
    assert run.verdict.verdict == "unknown"
    append_rows(journal, range(100))
    journal.event(Note(step=99, attempt=99, name="report", values={"total_steps": 400}))
    assert journal.flush()
    assert run.refresh()
    assert (run.numbers.step, run.numbers.total_steps, run.state.state) == (100, 400, RunState.RUNNING)
    assert run.numbers.samples_per_s == pytest.approx(80)
    assert run.verdict.health == "healthy"
    assert not run.refresh()
    for event in incident(120):
        journal.event(event)
    append_rows(journal, range(100, 125), loss={121: math.nan})
    assert run.refresh()
    assert run.verdict.health == "warning"
    assert "learning rate too high" in run.verdict.sentence
    assert [line.label for line in run.lines] == ["finding", "cause"]
    assert run.verdict.incidents[0].causes[0].advice == ("Lower it.",)
    journal.close()
    run.refresh()
    assert run.state.state is RunState.ENDED


@pytest.mark.parametrize(
    ("helped", "action", "health"),
    [(True, Action.REWIND, "warning"), (False, Action.REWIND, "failed"), (None, Action.STOP, "failed")],
)
def test_the_verdict_follows_the_last_incident(
    made_run: MakeRun, helped: bool | None, action: Action, health: str
) -> None:
    run = LiveRun(made_run("run", *incident(200, helped=helped, action=action)))
    assert run.verdict.verdict == health
    assert len(run.verdict.incidents) == 1


def test_refusals_in_a_row_are_one_incident(made_run: MakeRun) -> None:
    refusals = [Decision(step=9, attempt=at, action=Action.REFUSE, reason="nan") for at in (9, 10, 11, 200)]
    run = LiveRun(made_run("run", *refusals, loss=dict.fromkeys((9, 10, 11, 200), math.nan)))
    assert [(one.attempt, one.refused) for one in run.verdict.incidents] == [(9, 3), (200, 1)]
    assert ["applied again" in one.outcome for one in run.verdict.incidents] == [True, True]


DIES = """
import os, sys
from surefoot.journal import Journal
journal = Journal(sys.argv[1], info={}, on_failure=print)
os._exit(9)
"""


def test_a_process_that_dies_and_is_started_again_is_noticed(made_run: MakeRun, open_run: OpenRun) -> None:
    path = made_run()
    run = LiveRun(path)
    subprocess.run([sys.executable, "-c", DIES, str(path)], check=False)
    run.refresh()
    assert (run.state.state, run.verdict.verdict) == (RunState.DIED, "killed")
    assert "is gone" in run.verdict.sentence
    journal = open_run()
    append_rows(journal, range(300, 310))
    run.refresh()
    assert (run.state.state, run.verdict.health, run.numbers.step) == (RunState.RUNNING, "healthy", 310)


def test_a_run_of_another_host_lives_by_its_heartbeat(made_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_run()
    owner = {"host": "elsewhere", "pid": 1, "token": "t", "beats": 1, "interval": 0.1}
    (path / "writer.lock").write_text(json.dumps(owner))
    run = LiveRun(path)
    assert run.state.state is RunState.RUNNING
    monkeypatch.setattr(run_state, "_MIN_SILENCE", 0.0)
    monkeypatch.setattr(run_state, "_MISSED_BEATS", 0)
    run.refresh()
    assert run.state.state is RunState.DIED
    (path / "writer.lock").write_text(json.dumps(owner | {"beats": 2}))
    monkeypatch.setattr(run_state, "_MIN_SILENCE", 1e9)
    run.refresh()
    assert run.state.state is RunState.RUNNING


def test_a_deleted_run_keeps_what_was_read_and_a_new_one_is_read_anew(made_run: MakeRun) -> None:
    path = made_run()
    run = LiveRun(path)
    assert run.layers.names
    shutil.rmtree(path)
    assert run.refresh()
    assert (run.state.state, run.numbers.step) == (RunState.DELETED, 300)
    assert "deleted" in run.verdict.sentence
    assert len(run.scalars.curve(None, 0, 299, 1000)) == 300
    made_run("run", loss={7: 50.0})
    assert run.refresh()
    assert run.scalars.curve(None, 7, 7, 10)["stats"][0, 0, 1] == 50.0


def test_damaged_events_and_values_do_no_harm(made_run: MakeRun) -> None:
    path = made_run("run", *incident(100))
    with (path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"decision","attempt":"x"}\n{"kind":"finding"}\n[1]\n\xff\n{"kind":"trial","values":3}\n')
        file.write(b'{"kind":"diagnosis","attempt":101,"evidence":7,"advice":5,"detail":["\\u001b[31m"]}\n{"kind":"no')
    run = LiveRun(path)
    assert len(run.verdict.incidents) == 1
    assert not any("\x1b" in line.text for line in run.lines)

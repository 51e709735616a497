from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from surefoot.alarms.alarm_rules import AlarmGroup, level_of
from surefoot.alarms.watch_run import RunEnd, RunWatch
from surefoot.journal.writer import Journal, JournalLimits
from surefoot.records import (
    Action,
    Cause,
    CheckpointEvent,
    Decision,
    Diagnosis,
    Event,
    Finding,
    FindingKind,
    Note,
    Outcome,
    Severity,
    StepMetrics,
)


def open_journal(run: Path, rank: int = 0) -> Journal:
    return Journal(run, rank=rank, info={}, on_failure=lambda reason: None, limits=JournalLimits(heartbeat=0.1))


def row(step: int) -> StepMetrics:
    return StepMetrics(step=step, attempt=step, time=time.time(), loss=1.5)


def titles(watch: RunWatch, now: float | None = None) -> list[str]:
    return [f"{alarm.level}: {alarm.title}" for alarm in watch.poll(now)]


def test_a_finding_its_cause_and_what_was_done_are_one_alarm(tmp_path: Path) -> None:
    journal, watch = open_journal(tmp_path), RunWatch(tmp_path, since=0)
    severe = Severity.SEVERE
    journal.event(Finding(step=7, attempt=7, detector=FindingKind.JUMP, severity=severe, detail="the loss jumped"))
    cause = {"cause": Cause.BAD_BATCH, "confidence": 0.9, "detail": "A bad batch.", "advice": ("A", "B")}
    journal.event(Diagnosis(step=7, attempt=7, **cause))
    journal.event(Decision(step=7, attempt=7, action=Action.CONSTRAIN, reason="clip harder for a while"))
    assert journal.flush()
    assert watch.poll(10.0) == []
    (alarm,) = watch.poll(10.5)
    assert (alarm.level, alarm.title) == (
        "action",
        "step 7: action: continued with overrides, because clip harder for a while",
    )
    assert alarm.text.splitlines() == [
        "finding: the loss jumped",
        "cause: A bad batch. (90% sure)",
        "try: A",
        "try: B",
        "action: continued with overrides, because clip harder for a while",
    ]
    assert [event["kind"] for event in alarm.events] == ["finding", "diagnosis", "decision"]
    journal.close()
    assert titles(watch) == ["end: the run has ended, it had made no step"] or watch.ended is RunEnd.GONE


def test_trouble_of_another_rank_is_told_by_rank(tmp_path: Path) -> None:
    journal, other, watch = open_journal(tmp_path), open_journal(tmp_path, 1), RunWatch(tmp_path, since=0)
    other.event(Note(step=3, attempt=3, rank=1, name="degraded", detail="ValueError in watch: x"))
    assert other.flush()
    watch.poll(1.0)
    (title,) = titles(watch, 2.0)
    assert title == "crash: step 3, rank 1: surefoot's protection is OFF, training goes on: ValueError in watch: x"
    other.close()
    journal.close()


def test_no_step_for_some_minutes_is_told_once_until_steps_come_again(tmp_path: Path) -> None:
    journal, watch = open_journal(tmp_path), RunWatch(tmp_path, no_step_minutes=10, since=0)

    def write(step: int) -> None:
        journal.row(row(step))
        assert journal.flush()

    write(4)
    assert titles(watch, 1000.0) == []
    assert titles(watch, 1599.0) == []
    assert titles(watch, 1600.0) == ["stalled: no step for 10 minutes, last step 4, loss 1.5"]
    assert titles(watch, 9000.0) == []
    write(5)
    assert titles(watch, 9001.0) == []
    assert titles(watch, 9601.0) == ["stalled: no step for 10 minutes, last step 5, loss 1.5"]
    journal.close()


def test_a_dead_writer_is_told_and_a_closed_run_is_not(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "closed")
    watch = RunWatch(tmp_path / "closed", since=0)
    assert watch.poll() == []
    journal.event(Note(step=0, attempt=0, name="closed"))
    journal.close()
    assert titles(watch) == ["end: the run has ended, it had made no step"]
    assert watch.ended is RunEnd.CLOSED

    journal = open_journal(tmp_path / "dead")
    lock = tmp_path / "dead" / "writer.lock"
    owner = json.loads(lock.read_bytes())
    journal.close()
    lock.write_text(json.dumps(owner | {"start": owner["start"] - 1}))  # a process that has ended
    watch = RunWatch(tmp_path / "dead", since=0)
    assert titles(watch) == ["crash: the training process is gone, it had made no step"]
    assert watch.ended is RunEnd.GONE


def test_a_writer_on_another_host_is_gone_when_its_lock_no_longer_changes(tmp_path: Path) -> None:
    (tmp_path / "writer.lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "start": 1, "interval": 2.0}))
    watch = RunWatch(tmp_path, since=0)
    assert titles(watch, 100.0) == []
    assert titles(watch, 120.0) == []
    (gone,) = titles(watch, 131.0)
    assert gone.startswith("crash: the training process is gone")


def test_a_torn_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    event = {"kind": "note", "name": "degraded", "detail": "x", "step": 1, "attempt": 1, "time": 5.0}
    line = json.dumps(event).encode()
    (tmp_path / "writer.lock").write_text(json.dumps({"host": "elsewhere", "interval": 2.0}))
    events = tmp_path / "events.jsonl"
    events.write_bytes(b"no json\n" + line[:20])
    watch = RunWatch(tmp_path, since=0)
    assert titles(watch, 1.0) == []
    events.write_bytes(b"no json\n" + line + b"\n")
    watch.poll(2.0)
    assert len(titles(watch, 3.0)) == 1


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (Finding(step=0, attempt=0, detector=FindingKind.JUMP), "finding"),
        (Finding(step=0, attempt=0, detector=FindingKind.JUMP, severity=Severity.SEVERE), "severe"),
        (Decision(step=0, attempt=0, action=Action.REFUSE, reason=""), "finding"),
        (Decision(step=0, attempt=0, action=Action.REWIND, reason=""), "action"),
        (Decision(step=0, attempt=0, action=Action.REWIND, reason="", applied=False), "finding"),
        (Decision(step=0, attempt=0, action=Action.RELAX, reason=""), None),
        (Decision(step=0, attempt=0, action=Action.STOP, reason=""), "stop"),
        (Outcome(step=0, attempt=0, action=Action.REWIND, helped=False), "action"),
        (Note(step=0, attempt=0, name="exception", detail="ValueError: x"), "crash"),
        (Note(step=0, attempt=0, name="exception", detail="TrainingStopped: x"), None),
        (Note(step=0, attempt=0, name="report"), None),
        (CheckpointEvent(step=0, attempt=0, name="failed"), "severe"),
        (CheckpointEvent(step=0, attempt=0, name="saved"), None),
    ],
)
def test_level_of_each_event(event: Event, level: str | None) -> None:
    assert level_of(event.as_json()) == level


def test_a_stop_says_why() -> None:
    group = AlarmGroup()
    group.add(Decision(step=9, attempt=9, action=Action.STOP, reason="20 updates in a row were refused").as_json())
    alarm: Any = group.take()
    assert alarm.title == "step 9: surefoot stopped the run: 20 updates in a row were refused"
    assert group.take() is None

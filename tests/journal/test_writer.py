from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.journal import Journal, JournalLimits, RunDirectoryInUse, read
from surefoot.records import LAYER_STATS, NAN, SCHEMA, Event, Finding, JudgedBy, Note, StepMetrics, Verdict

ROW = StepMetrics(step=1, attempt=1, time=1.0)


def open_journal(run_dir: Path, on_failure: Callable[[str], None] = pytest.fail, **options: Any) -> Journal:
    return Journal(run_dir, info=options.pop("info", {}), on_failure=on_failure, **options)


def row_at(attempt: int, **values: Any) -> StepMetrics:
    return StepMetrics(step=attempt, attempt=attempt, time=float(attempt), **values)


def note(name: str, attempt: int = 0, **values: Any) -> Note:
    return Note(step=attempt, attempt=attempt, name=name, values=values)


class Failed:
    """Waits for the one call of on_failure."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.called = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.called.set()


floats = st.floats(width=32)
wide_ints = st.integers(-(2**63), 2**63 - 1)
narrow_ints = st.integers(-(2**31), 2**31 - 1)
values_of = {
    "step": wide_ints,
    "attempt": wide_ints,
    "time": st.floats(),
    "verdict": st.sampled_from(Verdict),
    "judged_by": st.sampled_from(JudgedBy),
}
rows = st.builds(
    StepMetrics,
    **{f.name: values_of.get(f.name, narrow_ints if f.type == "int" else floats) for f in fields(StepMetrics)},
)


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(rows, min_size=1, max_size=5), tensors=st.integers(1, 3), data=st.data())
def test_rows_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[StepMetrics], tensors: int, data: st.DataObject
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    tensor_stats = st.lists(floats, min_size=tensors * 8, max_size=tensors * 8)
    stats = [np.array(data.draw(tensor_stats), np.float32).reshape(tensors, 8) for _ in rows]
    journal = open_journal(run_dir)
    journal.layout([f"w{at}" for at in range(tensors)], [1] * tensors)
    for row, values in zip(rows, stats, strict=True):
        journal.row(row, values)
    journal.close()
    run = read(run_dir)
    for f in fields(StepMetrics):
        np.testing.assert_array_equal(run.scalars[f.name], [getattr(row, f.name) for row in rows])
    absent = np.stack(stats)[:, :, LAYER_STATS.index("nonfinite"), None] == -1
    expected = np.where(absent, np.float32(NAN), np.stack(stats))
    for at, stat in enumerate(LAYER_STATS):
        np.testing.assert_array_equal(run.layers.grid(stat), expected[:, :, at])


def test_values_are_copied_when_recorded(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.layout(["w"], [1])
    buffer, evidence = np.zeros((1, 8), np.float32), {"loss": [0.0]}
    for attempt in range(50):
        buffer[:], evidence["loss"][0] = attempt, float(attempt)
        journal.row(row_at(attempt), buffer)
        journal.event(Finding(step=attempt, attempt=attempt, detector="d", evidence=evidence))
    journal.close()
    run = read(tmp_path)
    assert run.layers["w"]["norm"].tolist() == list(range(50))
    assert [event["evidence"]["loss"] for event in run.events] == [[float(at)] for at in range(50)]
    assert all(event["time"] > 1e9 for event in run.events)


def test_each_attach_continues_after_the_last_attempt(tmp_path: Path) -> None:
    for attach in range(23):
        journal = open_journal(tmp_path, info={"attach": attach, "odd": math.nan})
        assert journal.last_attempt == 2 * attach - 1
        journal.layout(["w"], [1])
        journal.row(row_at(2 * attach), np.ones((1, 8), np.float32))
        journal.event(note("later", 2 * attach + 1))
        journal.close()
    run = read(tmp_path)
    assert run.scalars["attempt"].tolist() == run.layers.attempts.tolist() == list(range(0, 46, 2))
    assert len(list((tmp_path / "signals").iterdir())) == 2
    assert run.info["attach"] == 22
    assert run.info["schema"] == SCHEMA
    assert [earlier["attach"] for earlier in run.info["earlier"]] == list(range(2, 22))
    assert math.isnan(run.info["earlier"][0]["odd"])


def test_an_unreadable_run_json_is_kept_as_earlier(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"seed": 3')
    open_journal(tmp_path).close()
    assert read(tmp_path).info["earlier"] == [{"unreadable": '{"seed": 3'}]


def test_a_torn_line_does_not_damage_the_next(tmp_path: Path) -> None:
    content = b'{"kind":"note","attempt":4,"name":"a"}\n{"kind":"note","attempt":5,"name":"torn"}\n'
    first = content.index(b"\n") + 1
    for end in range(len(content) + 1):
        run_dir = tmp_path / str(end % 2)
        run_dir.mkdir(exist_ok=True)
        (run_dir / "events.jsonl").write_bytes(content[:end])
        journal = open_journal(run_dir, rank=0)
        journal.event(note("new"))
        journal.close()
        run = read(run_dir)
        assert run.events[-1]["name"] == "new"
        assert len(run.events) == 1 + (end >= first - 1) + (end >= len(content) - 1)
        assert run.skipped == (0 < end < first - 1) + (first < end < len(content) - 1)


def test_other_ranks_write_their_events_and_nothing_else(tmp_path: Path) -> None:
    main, other = open_journal(tmp_path), open_journal(tmp_path, rank=3, info={"ignored": 1})
    before = {path.name for path in tmp_path.iterdir()}
    other.layout(["w"], [1])
    other.row(ROW, np.ones((1, 8), np.float32))
    assert other.flush()
    assert {path.name for path in tmp_path.iterdir()} == before
    other.event(Note(step=2, attempt=2, rank=3, name="hello"))
    other.close()
    main.event(note("main", 1))
    main.close()
    assert [event["rank"] for event in read(tmp_path).events] == [0, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "events.jsonl", "events-rank3.jsonl", "signals"}


@pytest.mark.parametrize("name", ["events.jsonl", "signals/scalars-000000.bin", "signals/layers-000000.bin"])
def test_a_full_disk_stops_the_journal_and_not_the_training(tmp_path: Path, name: str) -> None:
    (tmp_path / "signals").mkdir()
    (tmp_path / name).symlink_to("/dev/full")
    failed = Failed()
    journal = open_journal(tmp_path, failed)
    journal.layout(["w"], [1])
    for attempt in range(100):
        journal.row(row_at(attempt), np.ones((1, 8), np.float32))
        journal.event(note("event", attempt))
    assert failed.called.wait(30)
    assert not journal.flush()
    assert journal.failure is not None
    assert "No space left" in journal.failure
    assert name in journal.failure
    journal.row(ROW, None)
    journal.event(note("after"))
    journal.layout(["v"], [1])
    journal.close()
    assert failed.reasons == [journal.failure]
    assert not (tmp_path / "writer.lock").exists()
    read(tmp_path)


@pytest.mark.parametrize("trouble", ["close", "raise"])
def test_on_failure_may_raise_or_close_the_journal(tmp_path: Path, trouble: str) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    called = threading.Event()

    def listen(_: str) -> None:
        called.set()
        if trouble == "raise":
            raise RuntimeError
        journal.close()

    journal = open_journal(tmp_path, listen)
    journal.event(note("lost"))
    assert called.wait(30)
    journal.close()
    journal._thread.join(30)
    assert not journal._thread.is_alive()
    assert not (tmp_path / "writer.lock").exists()


@pytest.mark.parametrize("where", ["file/run", "file", "/proc/run"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path, where: str, rank: int) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write a journal to .*Choose a run_dir"):
        open_journal(tmp_path / where, rank=rank)


def test_an_error_while_opening_releases_the_lock(tmp_path: Path) -> None:
    (tmp_path / "signals").touch()
    with pytest.raises(ValueError, match="signals"):
        open_journal(tmp_path)
    assert not (tmp_path / "writer.lock").exists()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(RunDirectoryInUse):
        open_journal(tmp_path)
    journal.event(note("still writing"))
    journal.close()
    journal.close()
    journal.event(note("too late"))
    journal.row(ROW)
    assert not journal.flush()
    open_journal(tmp_path).close()
    assert [event["name"] for event in read(tmp_path).events] == ["still writing"]


def test_a_lost_lock_stops_the_journal(tmp_path: Path) -> None:
    failed = Failed()
    journal = open_journal(tmp_path, failed, limits=JournalLimits(heartbeat=0.02))
    lock = tmp_path / "writer.lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"token": "another"}))
    assert failed.called.wait(30)
    assert "lost the run directory" in failed.reasons[0]
    journal.close()
    assert lock.exists()


def test_a_stalled_disk_drops_rows_before_events_and_counts_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")  # opening it for writing blocks until somebody reads
    journal = open_journal(tmp_path, limits=JournalLimits(queue_rows=20, queue_events=60))
    journal.event(note("blocks"))
    while journal._queue._queue.qsize():
        os.sched_yield()
    for attempt in range(50):
        journal.row(row_at(attempt))
    for attempt in range(70):
        journal.event(note("waits", attempt))
    with (tmp_path / "events.jsonl").open() as pipe:
        events = [json.loads(pipe.readline()) for _ in range(42)]
    journal.close()
    assert [event["name"] for event in events] == ["blocks", "journal_lost", *["waits"] * 40]
    assert events[1]["values"] == {"rows": 30, "events": 30, "unwritable": 0}
    assert read(tmp_path).scalars["attempt"].tolist() == list(range(20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strange(Event):
    kind: ClassVar[str] = "strange"
    content: Any = None
    more: dict[Any, Any] = field(default_factory=dict)


class Unreadable(Event):
    def as_json(self) -> dict[str, Any]:
        raise RuntimeError


def test_invalid_rows_and_events_are_dropped_and_counted(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    ones = np.ones((1, 8), np.float32)
    journal.row(row_at(0), ones)  # no layout yet
    journal.layout(["w"], [1])
    journal.row(row_at(1, loss="words"), ones)
    journal.row(row_at(2, bad_microbatch=2**40), ones)
    journal.row(row_at(3, loss=1e300, norm=np.float64(2), verdict=Verdict.OVERFLOW), ones)
    journal.row(row_at(4), np.ones((3, 8), np.float32))
    journal.row(row_at(5), object())  # pyright: ignore[reportArgumentType]
    journal.event(Unreadable(step=0, attempt=0))
    journal.event(Strange(step=0, attempt=0, content=object(), more={(1, 2): {3}, None: math.inf}))
    journal.close()
    assert journal.failure is None
    run = read(tmp_path)
    assert run.scalars["attempt"].tolist() == [0, 3, 4]
    assert run.scalars["loss"][1] == math.inf
    assert run.layers.attempts.tolist() == [3]
    strange = next(event for event in run.events if event["kind"] == "strange")
    assert strange["more"] == {"(1, 2)": [3], "null": math.inf}
    lost = [event["values"] for event in run.events if event.get("name") == "journal_lost"]
    totals = {key: sum(values[key] for values in lost) for key in ("rows", "events", "unwritable")}
    assert totals == {"rows": 1, "events": 1, "unwritable": 4}


def test_a_signal_handler_may_write_in_the_middle_of_a_row(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    handled = 0

    def handle(*_: object) -> None:
        nonlocal handled
        handled += 1
        journal.event(note("signal"))

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for attempt in range(3000):
            journal.row(row_at(attempt))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    journal.close()
    assert len(read(tmp_path).events) == handled
    assert read(tmp_path).scalars.rows == 3000

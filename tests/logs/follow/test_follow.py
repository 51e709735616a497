"""`surefoot diagnose --follow`: a log is diagnosed while it grows."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from made_diagnoses import failed, healthy

from surefoot.logs.follow import growing_log as following
from surefoot.logs.follow.follow import SILENT_SECONDS, NewsFilter, follow, open_log
from surefoot.logs.follow.growing_log import FileTail, GrowingLog, PipeTail, RereadLog
from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth, UnreadableInput
from surefoot.logs.run_curves import RunCurves, Series
from surefoot.logs.table import LogTable
from surefoot.records import Pattern

FAILED = frozenset({RunHealth.FAILED})


@dataclass
class Clock:
    """A simulated clock: each sleep makes the next change to the log, and the test ends after the last change."""

    changes: Iterator[Callable[[], object]]
    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        next(self.changes)()


def no_change() -> None:
    pass


def follow_through(
    path: Path, *changes: Callable[[], object], until: frozenset[RunHealth] = FAILED
) -> tuple[LogDiagnosis | None, list[str]]:
    """The last diagnosis, and the verdicts reported on the way."""
    reported: list[str] = []
    clock = Clock(iter([*changes, *[no_change] * 40]))
    log = open_log(str(path), columns={})
    try:
        last = follow(
            log,
            on_news=lambda diagnosis: reported.append(f"{diagnosis.verdict} {diagnosis.pattern}"),
            until=until,
            timeout=12,
            clock=clock,
            sleep=clock.sleep,
        )
    finally:
        log.close()
    return last, reported


def jsonl(losses: list[float], start: int = 0) -> str:
    return "".join(f'{{"step": {start + k}, "loss": {loss}}}\n' for k, loss in enumerate(losses))


def csv(losses: list[float], start: int = 0) -> str:
    return "" if start else "step,loss\n" + "".join(f"{k},{loss}\n" for k, loss in enumerate(losses))


def text(losses: list[float], start: int = 0) -> str:
    return "".join(f"step {start + k} | loss {loss:.4f}\n" for k, loss in enumerate(losses))


FALL = [float(x) for x in np.round(2 + 8 * np.exp(-np.arange(60) / 15) + 0.01 * np.cos(np.arange(60) * 2.4), 4)]
DEAD = [float("nan")] * 12


def append_to(path: Path, words: str) -> Callable[[], object]:
    def write() -> None:
        with path.open("a") as file:
            file.write(words)

    return write


@pytest.mark.parametrize("form", [jsonl, text])
def test_failed_run_is_reported_once_and_ends_the_follow(form: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(form(FALL))
    more = [append_to(path, form([loss], 60 + k)) for k, loss in enumerate(DEAD)]
    last, reported = follow_through(path, no_change, no_change, *more)
    assert last is not None
    assert last.verdict is RunHealth.FAILED
    assert reported == ["failed nonfinite"]


def test_csv_header_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n" + "".join(f"{k},{loss}\n" for k, loss in enumerate(FALL)))
    last, reported = follow_through(path, *[append_to(path, f"{60 + k},nan\n") for k in range(12)])
    assert last is not None
    assert last.source["format"] == "csv"
    assert reported == ["failed nonfinite"]


def test_healthy_run_reports_nothing_until_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(jsonl(FALL[:30]))
    last, reported = follow_through(path, *[append_to(path, jsonl([loss], 30 + k)) for k, loss in enumerate(FALL[30:])])
    assert last is not None
    assert last.verdict is RunHealth.HEALTHY
    assert last.last_step == 59
    assert reported == []


def test_incomplete_line_is_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("step,loss\n1,2.5\n2,2.25\n3,2.1")
    log = open_log(str(path), columns={})
    assert log.grown()
    half, whole = log.diagnose(quiet=False), log.diagnose(quiet=True)
    log.close()
    assert half is not None
    assert half.last_step == 2
    assert whole is not None
    assert whole.last_step == 3


def test_log_may_be_created_after_the_follow_starts(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    last, reported = follow_through(path, no_change, no_change, lambda: path.write_text(jsonl(FALL + DEAD)))
    assert last is not None
    assert reported == ["failed nonfinite"]


def test_truncated_or_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(jsonl(FALL))

    def rotated() -> None:
        path.rename(tmp_path / "train.jsonl.1")

    def new() -> None:
        path.write_text(jsonl(FALL[:10]))

    def cut() -> None:
        with path.open("w") as file:
            file.write(jsonl(FALL[:5]))

    last, _ = follow_through(path, rotated, no_change, new)
    assert last is not None
    assert last.last_step == 9
    last, _ = follow_through(path, cut)
    assert last is not None
    assert last.last_step == 4


def test_last_lines_of_a_rotated_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("one\n")
    tail = FileTail(str(path))
    assert tail.read() == (b"one\n", False)
    with path.open("a") as old:
        path.rename(tmp_path / "train.log.1")
        old.write("two\n")
    assert tail.read() == (b"two\n", False)
    assert tail.read() == (b"", False)
    path.write_text("three\n")
    assert tail.read() == (b"three\n", True)
    tail.close()


def test_pipe_is_read_to_its_end() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"one\n")
    os.close(write_end)
    with open(read_end, "rb") as stream:
        tail = PipeTail(stream)
        data = b""
        while not tail.ended:
            data += tail.read()[0]
    assert data == b"one\n"


def test_rewritten_json_document_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"

    def state(losses: list[float]) -> str:
        rows = ", ".join(f'{{"step": {k}, "loss": {loss}}}' for k, loss in enumerate(losses))
        return f'{{"global_step": {len(losses)}, "log_history": [{rows}]}}'.replace("nan", "NaN")

    path.write_text(state(FALL))
    assert isinstance(open_log(str(path), columns={}), RereadLog)
    last, reported = follow_through(path, no_change, lambda: path.write_text(state(FALL + DEAD)))
    assert last is not None
    assert reported == ["failed nonfinite"]


def test_large_log_read_in_parts_has_the_same_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_REREAD_BYTES", 400)
    for form, name in ((jsonl, "a.jsonl"), (csv, "a.csv"), (text, "a.log")):
        path = tmp_path / name
        path.write_text(form(FALL + DEAD))
        log = open_log(str(path), columns={})
        log.grown()
        diagnosis = log.diagnose(quiet=True)
        log.close()
        assert diagnosis is not None
        assert (diagnosis.verdict, diagnosis.last_step, diagnosis.source["points"]) == (RunHealth.FAILED, 71, 72)


def test_row_of_a_large_log_may_arrive_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_REREAD_BYTES", 100)
    path = tmp_path / "train.log"
    path.write_text("")
    log = open_log(str(path), columns={})
    for epoch, loss in enumerate(FALL):
        append_to(path, f"Epoch {epoch}\n")()
        log.grown()
        append_to(path, f"Training loss: {loss}, accuracy: 0.5\n")()
        log.grown()
        half = log.diagnose(quiet=True)
    append_to(path, "Epoch 60\nTraining loss: nan, accuracy: 0.5")()
    log.grown()
    diagnosis = log.diagnose(quiet=True)
    log.close()
    assert half is not None
    assert diagnosis is not None
    assert half.as_json()["source"]["points"] == 60
    assert (half.verdict, half.last_step) == (RunHealth.HEALTHY, 59)
    assert (diagnosis.verdict, diagnosis.last_step) == (RunHealth.FAILED, 60)


@pytest.mark.parametrize("data", [gzip.compress(jsonl(FALL).encode(), mtime=0), b"\x28\xb5\x2f\xfd" + bytes(99)])
def test_compressed_log_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "train.log.gz"
    path.write_bytes(data)
    log = open_log(str(path), columns={})
    with pytest.raises(UnreadableInput, match="compressed"):
        log.grown()
    log.close()


def test_large_document_in_a_pipe_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_REREAD_BYTES", 10)

    def read(_: object) -> list[LogTable]:
        return [LogTable(format="json", path="-", records=1, columns={})]

    log = GrowingLog(PipeTail(io.BytesIO(b'{"loss":\n[1, 2, 3]}\n')), "-", read, lambda _: healthy())
    with pytest.raises(UnreadableInput, match="cannot be followed"):
        while not log.ended:
            log.grown()


@dataclass
class Scripted:
    """A log with a sequence of planned diagnoses."""

    diagnoses: list[LogDiagnosis]
    ended: bool = False

    def grown(self) -> bool:
        return True

    def diagnose(self, *, quiet: bool) -> LogDiagnosis | None:
        diagnosis = self.diagnoses.pop(0)
        self.ended = not self.diagnoses
        return diagnosis

    def close(self) -> None: ...


def reported_by(diagnoses: list[LogDiagnosis], until: frozenset[RunHealth]) -> list[str]:
    sentences: list[str] = []
    clock = Clock(iter([no_change] * 1000))
    follow(
        Scripted(diagnoses), on_news=lambda a: sentences.append(a.sentence), until=until, clock=clock, sleep=clock.sleep
    )
    return sentences


def test_same_incident_is_reported_once() -> None:
    def spike(onset: int, last: int) -> LogDiagnosis:
        return healthy(
            verdict=RunHealth.WARNING,
            pattern=Pattern.RECOVERED_SPIKE,
            sentence=f"spike at {onset}",
            onset_step=onset,
            last_step=last,
        )

    sentences = reported_by([spike(10, 20), spike(10, 30), spike(11, 40), spike(55, 60), spike(55, 70)], FAILED)
    assert sentences == ["spike at 10", "spike at 55"]


def test_recovery_is_reported() -> None:
    news_filter = NewsFilter()
    assert not news_filter.is_news(healthy())
    assert news_filter.is_news(failed())
    assert news_filter.is_news(healthy())
    assert not news_filter.is_news(healthy())


def test_failure_is_reported_only_after_further_losses_confirm_it() -> None:
    def jumped(points: int) -> LogDiagnosis:
        steps = np.arange(points, dtype=float)
        return failed(pattern=Pattern.JUMP, onset_step=50, curves=RunCurves(loss=Series("loss", steps, steps)))

    assert reported_by([jumped(51), healthy(), healthy()], FAILED) == []
    assert reported_by([jumped(51), jumped(56), jumped(61), healthy()], FAILED) == [failed().sentence]
    assert reported_by([jumped(51), jumped(56), healthy(), jumped(57), healthy(), healthy()], FAILED) == []


def test_unconfirmed_failure_is_reported_when_the_log_stays_silent() -> None:
    steps = np.arange(51, dtype=float)
    suspected = failed(pattern=Pattern.JUMP, onset_step=50, curves=RunCurves(loss=Series("loss", steps, steps)))
    clock = Clock(iter([no_change] * 1000))

    class Silent(Scripted):
        def grown(self) -> bool:
            return clock.now == 0

        def diagnose(self, *, quiet: bool) -> LogDiagnosis | None:
            return self.diagnoses[0]

    report_times: list[float] = []
    last = follow(
        Silent([suspected]),
        on_news=lambda _: report_times.append(clock.now),
        until=FAILED,
        clock=clock,
        sleep=clock.sleep,
    )
    assert last is suspected
    assert report_times == [SILENT_SECONDS]


def test_exception_at_the_end_is_reported_once_the_log_is_quiet(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(text(FALL))
    crash = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
    crash += "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    last, reported = follow_through(path, no_change, append_to(path, crash))
    assert last is not None
    assert last.causes[0].cause == "out_of_memory"
    assert reported == ["failed none"]


def test_warning_ends_the_follow_only_if_requested() -> None:
    warning = healthy(verdict=RunHealth.WARNING, pattern=Pattern.PLATEAU, sentence="no learning")
    diagnoses = [warning, warning, healthy(sentence="recovered"), healthy()]
    assert reported_by(list(diagnoses), FAILED) == ["no learning", "recovered"]
    assert reported_by(list(diagnoses), FAILED | {RunHealth.WARNING}) == ["no learning"]


def test_slow_diagnosis_runs_less_often() -> None:
    clock = Clock(iter([no_change] * 1000))
    judged: list[float] = []

    class Slow(Scripted):
        def diagnose(self, *, quiet: bool) -> LogDiagnosis | None:
            judged.append(clock.now)
            clock.now += 2.0
            return super().diagnose(quiet=quiet)

    follow(Slow([healthy()] * 5), on_news=print, until=FAILED, clock=clock, sleep=clock.sleep)
    assert min(np.diff(judged)[:-1]) >= 20

"""A log that is judged while it grows."""

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
    """A time of its own: each sleep lets the next thing happen to the log, and ends the test when all has happened."""

    happens: Iterator[Callable[[], object]]
    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        next(self.happens)()


def nothing() -> None:
    pass


def followed(
    path: Path, *happens: Callable[[], object], until: frozenset[RunHealth] = FAILED
) -> tuple[LogDiagnosis | None, list[str]]:
    """What came out in the end, and the verdicts that were spoken on the way."""
    spoken: list[str] = []
    clock = Clock(iter([*happens, *[nothing] * 40]))
    log = open_log(str(path), columns={})
    try:
        last = follow(
            log,
            on_news=lambda answer: spoken.append(f"{answer.verdict} {answer.pattern}"),
            until=until,
            timeout=12,
            clock=clock,
            sleep=clock.sleep,
        )
    finally:
        log.close()
    return last, spoken


def jsonl(losses: list[float], start: int = 0) -> str:
    return "".join(f'{{"step": {start + k}, "loss": {loss}}}\n' for k, loss in enumerate(losses))


def csv(losses: list[float], start: int = 0) -> str:
    return "" if start else "step,loss\n" + "".join(f"{k},{loss}\n" for k, loss in enumerate(losses))


def text(losses: list[float], start: int = 0) -> str:
    return "".join(f"step {start + k} | loss {loss:.4f}\n" for k, loss in enumerate(losses))


FALL = [float(x) for x in np.round(2 + 8 * np.exp(-np.arange(60) / 15) + 0.01 * np.cos(np.arange(60) * 2.4), 4)]
DEAD = [float("nan")] * 12


def appended(path: Path, words: str) -> Callable[[], object]:
    def write() -> None:
        with path.open("a") as file:
            file.write(words)

    return write


@pytest.mark.parametrize("form", [jsonl, text])
def test_a_run_that_dies_is_told_once_and_ends_it(form: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(form(FALL))
    more = [appended(path, form([loss], 60 + k)) for k, loss in enumerate(DEAD)]
    last, spoken = followed(path, nothing, nothing, *more)
    assert last is not None
    assert last.verdict is RunHealth.FAILED
    assert spoken == ["failed nonfinite"]


def test_a_csv_keeps_its_header(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n" + "".join(f"{k},{loss}\n" for k, loss in enumerate(FALL)))
    last, spoken = followed(path, *[appended(path, f"{60 + k},nan\n") for k in range(12)])
    assert last is not None
    assert last.source["format"] == "csv"
    assert spoken == ["failed nonfinite"]


def test_a_healthy_run_is_followed_in_silence_until_nothing_comes_any_more(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(jsonl(FALL[:30]))
    last, spoken = followed(path, *[appended(path, jsonl([loss], 30 + k)) for k, loss in enumerate(FALL[30:])])
    assert last is not None
    assert last.verdict is RunHealth.HEALTHY
    assert last.last_step == 59
    assert spoken == []


def test_a_line_that_is_still_being_written_is_not_judged(tmp_path: Path) -> None:
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


def test_a_log_may_come_later_than_the_one_who_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    last, spoken = followed(path, nothing, nothing, lambda: path.write_text(jsonl(FALL + DEAD)))
    assert last is not None
    assert spoken == ["failed nonfinite"]


def test_a_file_that_was_cut_or_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(jsonl(FALL))

    def rotated() -> None:
        path.rename(tmp_path / "train.jsonl.1")

    def new() -> None:
        path.write_text(jsonl(FALL[:10]))

    def cut() -> None:
        with path.open("w") as file:
            file.write(jsonl(FALL[:5]))

    last, _ = followed(path, rotated, nothing, new)
    assert last is not None
    assert last.last_step == 9
    last, _ = followed(path, cut)
    assert last is not None
    assert last.last_step == 4


def test_the_last_lines_of_a_file_that_was_put_aside_are_read(tmp_path: Path) -> None:
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


def test_a_pipe_is_read_to_its_end() -> None:
    there, here = os.pipe()
    os.write(here, b"one\n")
    os.close(here)
    with open(there, "rb") as stream:
        tail = PipeTail(stream)
        found = b""
        while not tail.ended:
            found += tail.read()[0]
    assert found == b"one\n"


def test_a_document_that_is_written_as_a_whole_is_read_again_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"

    def state(losses: list[float]) -> str:
        rows = ", ".join(f'{{"step": {k}, "loss": {loss}}}' for k, loss in enumerate(losses))
        return f'{{"global_step": {len(losses)}, "log_history": [{rows}]}}'.replace("nan", "NaN")

    path.write_text(state(FALL))
    assert isinstance(open_log(str(path), columns={}), RereadLog)
    last, spoken = followed(path, nothing, lambda: path.write_text(state(FALL + DEAD)))
    assert last is not None
    assert spoken == ["failed nonfinite"]


def test_a_large_log_is_read_in_parts_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_REREAD_BYTES", 400)
    for form, name in ((jsonl, "a.jsonl"), (csv, "a.csv"), (text, "a.log")):
        path = tmp_path / name
        path.write_text(form(FALL + DEAD))
        log = open_log(str(path), columns={})
        log.grown()
        answer = log.diagnose(quiet=True)
        log.close()
        assert answer is not None
        assert (answer.verdict, answer.last_step, answer.source["points"]) == (RunHealth.FAILED, 71, 72)


def test_a_row_of_a_large_log_may_come_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_REREAD_BYTES", 100)
    path = tmp_path / "train.log"
    path.write_text("")
    log = open_log(str(path), columns={})
    for epoch, loss in enumerate(FALL):
        appended(path, f"Epoch {epoch}\n")()
        log.grown()
        appended(path, f"Training loss: {loss}, accuracy: 0.5\n")()
        log.grown()
        half = log.diagnose(quiet=True)
    appended(path, "Epoch 60\nTraining loss: nan, accuracy: 0.5")()
    log.grown()
    answer = log.diagnose(quiet=True)
    log.close()
    assert half is not None
    assert answer is not None
    assert half.as_json()["source"]["points"] == 60
    assert (half.verdict, half.last_step) == (RunHealth.HEALTHY, 59)
    assert (answer.verdict, answer.last_step) == (RunHealth.FAILED, 60)


@pytest.mark.parametrize("data", [gzip.compress(jsonl(FALL).encode(), mtime=0), b"\x28\xb5\x2f\xfd" + bytes(99)])
def test_a_compressed_log_is_not_followed_in_vain(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "train.log.gz"
    path.write_bytes(data)
    log = open_log(str(path), columns={})
    with pytest.raises(UnreadableInput, match="compressed"):
        log.grown()
    log.close()


def test_a_large_document_in_a_pipe_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_REREAD_BYTES", 10)

    def read(_: object) -> list[LogTable]:
        return [LogTable(format="json", path="-", records=1, columns={})]

    log = GrowingLog(PipeTail(io.BytesIO(b'{"loss":\n[1, 2, 3]}\n')), "-", read, lambda _: healthy())
    with pytest.raises(UnreadableInput, match="cannot be followed"):
        while not log.ended:
            log.grown()


@dataclass
class Scripted:
    """A log with one answer after the other."""

    answers: list[LogDiagnosis]
    ended: bool = False

    def grown(self) -> bool:
        return True

    def diagnose(self, *, quiet: bool) -> LogDiagnosis | None:
        found = self.answers.pop(0)
        self.ended = not self.answers
        return found

    def close(self) -> None: ...


def spoken_of(answers: list[LogDiagnosis], until: frozenset[RunHealth]) -> list[str]:
    told: list[str] = []
    clock = Clock(iter([nothing] * 1000))
    follow(Scripted(answers), on_news=lambda a: told.append(a.sentence), until=until, clock=clock, sleep=clock.sleep)
    return told


def test_a_trouble_is_told_once_and_again_only_when_it_begins_anew() -> None:
    def spike(onset: int, last: int) -> LogDiagnosis:
        return healthy(
            verdict=RunHealth.WARNING,
            pattern=Pattern.RECOVERED_SPIKE,
            sentence=f"spike at {onset}",
            onset_step=onset,
            last_step=last,
        )

    told = spoken_of([spike(10, 20), spike(10, 30), spike(11, 40), spike(55, 60), spike(55, 70)], FAILED)
    assert told == ["spike at 10", "spike at 55"]


def test_trouble_that_has_passed_is_told() -> None:
    voice = NewsFilter()
    assert not voice.is_news(healthy())
    assert voice.is_news(failed())
    assert voice.is_news(healthy())
    assert not voice.is_news(healthy())


def test_a_failure_is_not_believed_before_some_losses_came_after_it() -> None:
    def jumped(points: int) -> LogDiagnosis:
        steps = np.arange(points, dtype=float)
        return failed(pattern=Pattern.JUMP, onset_step=50, curves=RunCurves(loss=Series("loss", steps, steps)))

    assert spoken_of([jumped(51), healthy(), healthy()], FAILED) == []
    assert spoken_of([jumped(51), jumped(56), jumped(61), healthy()], FAILED) == [failed().sentence]
    assert spoken_of([jumped(51), jumped(56), healthy(), jumped(57), healthy(), healthy()], FAILED) == []


def test_a_feared_failure_is_told_when_the_log_falls_silent_for_long() -> None:
    steps = np.arange(51, dtype=float)
    feared = failed(pattern=Pattern.JUMP, onset_step=50, curves=RunCurves(loss=Series("loss", steps, steps)))
    clock = Clock(iter([nothing] * 1000))

    class Silent(Scripted):
        def grown(self) -> bool:
            return clock.now == 0

        def diagnose(self, *, quiet: bool) -> LogDiagnosis | None:
            return self.answers[0]

    told: list[float] = []
    last = follow(
        Silent([feared]), on_news=lambda _: told.append(clock.now), until=FAILED, clock=clock, sleep=clock.sleep
    )
    assert last is feared
    assert told == [SILENT_SECONDS]


def test_a_log_that_ends_in_an_exception_is_believed_once_it_is_quiet(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(text(FALL))
    crash = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
    crash += "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    last, spoken = followed(path, nothing, appended(path, crash))
    assert last is not None
    assert last.causes[0].cause == "out_of_memory"
    assert spoken == ["failed none"]


def test_a_warning_ends_it_only_when_asked() -> None:
    warning = healthy(verdict=RunHealth.WARNING, pattern=Pattern.PLATEAU, sentence="no learning")
    answers = [warning, warning, healthy(sentence="well again"), healthy()]
    assert spoken_of(list(answers), FAILED) == ["no learning", "well again"]
    assert spoken_of(list(answers), FAILED | {RunHealth.WARNING}) == ["no learning"]


def test_judging_that_takes_long_is_done_less_often() -> None:
    clock = Clock(iter([nothing] * 1000))
    judged: list[float] = []

    class Slow(Scripted):
        def diagnose(self, *, quiet: bool) -> LogDiagnosis | None:
            judged.append(clock.now)
            clock.now += 2.0
            return super().diagnose(quiet=quiet)

    follow(Slow([healthy()] * 5), on_news=print, until=FAILED, clock=clock, sleep=clock.sleep)
    assert min(np.diff(judged)[:-1]) >= 20

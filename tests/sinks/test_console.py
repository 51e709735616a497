from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot.records import EVENT_MARK, NAN, Action, CheckpointEvent, Decision, Note, StepMetrics, Verdict
from surefoot.sinks.console import PlainConsole, RunConsole
from surefoot.sinks.progress import ProgressMetrics, ProgressTracker, fit_to_width, format_duration, format_metrics


def row(attempt: int, **figures: float) -> StepMetrics:
    return StepMetrics(step=attempt, attempt=attempt, time=0.0, **figures)  # pyright: ignore[reportArgumentType]


def make_console(first: bool = True) -> tuple[RunConsole, io.StringIO]:
    file = io.StringIO()
    return RunConsole(
        "short", total_steps=40, every=10, is_first=first, rank=0 if first else 3, output=PlainConsole(file)
    ), file


def test_plain_output_has_lines_for_the_first_every_tenth_and_the_last_update() -> None:
    console, file = make_console()
    with console:
        console.start({"model": "tiny", "effective batch": 32})
        for attempt in range(38):
            console.update(row(attempt, loss=2.0, lr=0.1, norm=1.0, seconds=0.5, tokens=100, data_wait=0.05))
            console.update(row(attempt, loss=2.0))  # the same step again
        console.update(row(39, loss=1.5, seconds=1.0, memory=2e9, seconds_left=7200.0))
    output = file.getvalue()
    assert output.startswith("short\n  model            tiny\n  effective batch  32\n")
    assert re.findall(r"step (\d+)/40", output) == ["1", "10", "20", "30", "40"]
    assert "step 20/40  loss 2.0000  lr 0.1  grad_norm 1  200 tokens/s  data wait 10%\n" in output
    assert output.endswith("memory 2.0 GB  2 h 0 min left\n")
    assert "\x1b" not in output


def test_console_output_can_be_diagnosed_as_a_log(tmp_path: Path) -> None:
    console, file = make_console()
    for attempt in range(400):
        console.update(row(attempt, loss=5.0 / (1 + attempt / 40), lr=1e-3, norm=1.0, seconds=0.1, tokens=64))
    log = tmp_path / "train.log"
    log.write_text(file.getvalue())
    diagnosis = surefoot.diagnose(log)
    assert diagnosis.verdict == "healthy"
    assert diagnosis.last_step == 400


def test_refused_update_gets_no_line() -> None:
    console, file = make_console()
    console.update(row(0, loss=2.0))
    console.update(StepMetrics(step=9, attempt=9, time=0.0, loss=NAN, verdict=Verdict.NONFINITE))
    assert file.getvalue().count("\n") == 1


def test_rows_from_before_a_rewind_are_not_shown() -> None:
    console, file = make_console()
    console.update(row(0, loss=2.0))
    console.on_event(Note(step=3, attempt=39, name="rewound", values={"step": 3, "attempt": 3}))
    assert console.update(row(39, loss=9.0)) is None  # a row from before the rewind
    assert console.update(StepMetrics(step=9, attempt=40, time=0.0, loss=1.9)) is not None
    assert "9.0" not in file.getvalue()


def test_other_ranks_print_only_errors() -> None:
    console, file = make_console(first=False)
    log = logging.getLogger("surefoot")
    with console:
        console.start({"model": "tiny"})
        console.update(row(0, loss=2.0))
        console.on_event(CheckpointEvent(step=1, attempt=1, name="failed", detail="the disk is full"))
        console.evaluated(1, 2.0)
        console.print("hello")
        console.finish({"loss": 2.0})
    assert file.getvalue() == ""
    console.start({})
    log.warning("surefoot: not so bad")
    log.error("surefoot: the journal has stopped")
    console.finish({})
    assert file.getvalue() == "error: rank 3: the journal has stopped\n"


def test_logged_messages_are_shown_once() -> None:
    console, file = make_console()
    log = logging.getLogger("surefoot")
    with console:
        console.start({})
        log.warning("surefoot: the optimizer is not fused")
        log.warning("surefoot: not saved: the disk is full", extra={EVENT_MARK: True})
        console.on_event(CheckpointEvent(step=7, attempt=9, name="failed", detail="not saved: the disk is full"))
        console.on_event(CheckpointEvent(step=9, attempt=11, name="saved", values={"step": 8}))
    assert file.getvalue().splitlines()[1:] == [
        "warning: the optimizer is not fused",
        "step 7       failed    not saved: the disk is full",
        "step 8       saved     checkpoint written",
    ]
    assert not log.handlers


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_terminal_has_one_live_line_below_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    master, slave = os.openpty()
    with open(slave, "w") as file, RunConsole("short", total_steps=40, every=10, output=PlainConsole(file)) as console:
        console.start({"model": "tiny"})
        for attempt in range(6):
            console.update(row(attempt, loss=2.0, lr=0.1, norm=1.0))
        console.on_event(Decision(step=5, attempt=5, action=Action.REFUSE, reason="the loss is nan"))
        console.update(row(9, loss=1.75, lr=0.1, norm=1.0))
        console.finish({"took": "a while"})
    output = b"".join(iter(lambda: _read(master), b""))
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode()).replace("\r\n", "\n")
    assert re.search(r"^(.*\r)?step 5 +action +refused the update", text, re.MULTILINE)
    assert text.endswith("step 10/40  loss 1.7500  lr 0.1  grad_norm 1  update refused at 5\n  took  a while\n")
    assert b"\x1b[?25h" in output  # the cursor is shown again


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # raised by Linux when the other side is closed
        return b""


def test_closed_stdout_does_not_end_the_run() -> None:
    script = """
import sys
from surefoot.records import StepMetrics
from surefoot.sinks.console import RunConsole
with RunConsole("run", total_steps=300, every=100) as console:
    console.start({"model": "tiny"})
    sys.stdin.read()
    for attempt in range(300):
        console.update(StepMetrics(step=attempt, attempt=attempt, time=0.0, loss=2.0))
    console.finish({"took": "a while"})
assert "torch" not in sys.modules
print("the end", file=sys.stderr)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"run\n"
        process.stdout.close()
        process.stdin.close()
        output = process.stderr.read().decode()
    assert (process.returncode, output) == (0, "the end\n")


def test_speed_is_averaged_and_memory_is_the_last_reading() -> None:
    tracker = ProgressTracker(3)
    tracker.add(row(0, seconds=100.0, tokens=1.0, memory=5e9, memory_peak=6e9))
    for attempt in (1, 2, 3):
        tracker.add(row(attempt, seconds=0.5, tokens=50.0, samples=2.0, data_wait=0.25))
    now = tracker.current()
    assert (now.step, now.tokens_per_s, now.samples_per_s, now.data_wait, now.memory) == (4, 100, 4, 0.5, 5e9)


def test_narrow_terminal_drops_the_least_important_parts() -> None:
    metrics = ProgressMetrics(
        step=5, loss=2.0, lr=0.1, grad_norm=1.0, tokens_per_s=99.0, data_wait=0.5, memory=1e9, seconds_left=60
    )
    parts = format_metrics(metrics, 10)
    assert fit_to_width(parts, 200, "note").endswith("99 tokens/s  data wait 50%  memory 1.0 GB  60 s left  note")
    assert fit_to_width(parts, 60) == "step 5/10  loss 2.0000  lr 0.1  grad_norm 1  60 s left"
    assert fit_to_width(parts, 30) == "step 5/10  loss 2.0000  60 s left"
    assert "grad_norm nan" in " ".join(format_metrics(ProgressMetrics(step=1), 10).values())


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45 s"), (700, "12 min"), (12000, "3 h 20 min"), (187200, "2 d 4 h")]
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text

"""`surefoot report`: of runs that ended, were killed, are live, of an older version, damaged, and of several ranks."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.journal import Journal
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
    StepMetrics,
    Verdict,
)
from surefoot.report.run_charts import kept_points
from surefoot.report.run_checklists import CheckAnswer, CheckedItem
from surefoot.report.run_report import make_report

STORED = Path(__file__).parents[1] / "stored" / "attached"
EVIL = '<script>alert("x")</script>'
NAN = math.nan


def journal(folder: Path, *, info: dict[str, object] | None = None, rank: int = 0) -> Journal:
    return Journal(folder, info=info or {}, rank=rank, on_failure=pytest.fail)


def write(folder: Path, *events: Event, steps: int = 60, bad: int = -1, info: dict[str, object] | None = None) -> Path:
    """A run with these events that was closed."""
    open_journal = journal(folder, info=info)
    open_journal.layout(["in.weight", "out.weight"], [8, 8])
    for k in range(steps):
        row = StepMetrics(
            step=k,
            attempt=k,
            time=1e9 + k,
            loss=NAN if k == bad else 2.0 - k / 100,
            loss_d1=-0.01,
            norm=NAN if k == bad else 1.0,
            lr=0.1,
            seconds=0.5,
            samples=8,
            verdict=Verdict.NONFINITE if k == bad else Verdict.APPLIED,
        )
        open_journal.row(row, np.full((2, 8), 0.5, np.float32))
    for event in events:
        open_journal.event(event)
    open_journal.event(Note(step=steps, attempt=steps, name="closed"))
    open_journal.close()
    return folder


def incident(cause: Cause = Cause.LEARNING_RATE, detail: str = "the loss is 9") -> list[Event]:
    return [
        Finding(step=40, attempt=40, detector=FindingKind.JUMP, detail=detail),
        Diagnosis(step=42, attempt=42, cause=cause, confidence=0.9, detail="Cause. the learning rate is 1"),
        Decision(step=42, attempt=42, action=Action.REWIND, cause=cause, reason=detail, remedy="past the bad data"),
        Note(step=30, attempt=43, name="rewound", values={"step": 30, "attempt": 29, "lost": 14}),
        Outcome(step=50, attempt=63, action=Action.REWIND, helped=True, detail="it helped: the loss is 1.4"),
    ]


def report(run_dir: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["report", str(run_dir), "--out", "-", *options])
    assert result.exit_code == 0, result.output
    return result.stdout


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and whether tags that are opened are closed."""

    VOID = frozenset({"meta", "br", "img", "line", "rect", "circle", "polyline"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.mark.parametrize("options", [(), ("--markdown",)])
def test_report_tells_what_happened_and_what_was_done(options: tuple[str, ...], tmp_path: Path) -> None:
    info: dict[str, object] = {"config": {"model": "Decoder", "policy": {"observe": False}}}
    text = report(write(tmp_path / "run", *incident(), info=info), *options)
    for words in (
        "WARNING",
        "Step 40: learning rate too high",
        "rewound to step 30, past the bad data",
        "14 updates lost",
        "it helped: the loss is 1.4",
        "the gradient norm is measured at every update",
        "in 60 of 60 updates",
        "a checkpoint is saved at least hourly",
        "Decoder",
    ):
        assert words in text


def test_page_is_self_contained_and_runs_nothing(tmp_path: Path) -> None:
    page = report(write(tmp_path / "run", *incident(detail=EVIL), info={"config": {"model": EVIL, EVIL: 3}}))
    parsed = Tags(page)
    assert parsed.open == [], "every tag is closed"
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "link", "iframe", "object", "img", "form", "base"}
    assert "svg" in names
    for _, attributes in parsed.tags:
        assert not any(name.startswith("on") or name in ("style", "src", "href") for name in attributes)
    (policy,) = [a["content"] for t, a in parsed.tags if t == "meta" and a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "&lt;script&gt;" in page


def test_markdown_leaves_no_markup_from_the_run(tmp_path: Path) -> None:
    detail = f"{EVIL} @everyone [x](http://e.vil) | `code` **b**"
    text = report(write(tmp_path / "run", *incident(detail=detail)), "--markdown")
    assert "<script>" not in text
    assert "@everyone" not in text
    assert "](http" not in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4), "a cell does not end at a bar in its text"


def test_incidents_are_marked_and_gradient_flow_is_drawn(tmp_path: Path) -> None:
    page = report(write(tmp_path / "run", *incident(), bad=45))
    assert page.count('class="mark"') >= 3, "in every panel"
    assert "gradient norm by tensor, from input to output" in page
    assert "out.weight" in page
    assert '<rect class="bad"' in page, "the NaN is shaded"


@pytest.mark.parametrize("bad", [NAN, math.inf, 1e9, -1e9])
def test_one_point_in_a_million_is_drawn(bad: float) -> None:
    values = np.sin(np.arange(1_000_000) / 1000.0)
    values[[123_456, 123_457]] = bad, 77.0
    kept = kept_points(values)
    assert len(kept) < 4000
    assert 123_456 in kept
    assert 123_457 in kept or bad == 1e9, "a spike beside a NaN is drawn too"


def test_killed_live_stopped_and_old_runs(tmp_path: Path) -> None:
    killed = write(tmp_path / "killed")
    lines = (killed / "events.jsonl").read_text().splitlines()
    (killed / "events.jsonl").write_text("\n".join(line for line in lines if '"closed"' not in line) + "\n")
    assert "KILLED: The process ended after step 60 without closing" in report(killed, "--markdown")
    live = journal(tmp_path / "live", info={})
    live.event(Note(step=0, attempt=0, name="attached"))
    for k in range(12):
        live.row(StepMetrics(step=k, attempt=k, time=1e9 + k, loss=2.0 - k / 10, norm=1.0))
    live.flush()
    assert report(tmp_path / "live", "--markdown").splitlines()[1].startswith("## RUNNING")
    live.close()
    stop = Decision(step=50, attempt=50, action=Action.STOP, reason="3 attempts in a row did not help")
    stopped = report(write(tmp_path / "stopped", *incident()[:2], stop), "--markdown")
    assert stopped.splitlines()[1].startswith("## FAILED")
    assert "3 attempts in a row did not help" in stopped
    old = report(Path(shutil.copytree(STORED, tmp_path / "old")), "--markdown")
    assert "the batch itself holds values that are not finite" in old
    assert "Checkpoints on disk: 50, 61" in old


def test_events_of_other_ranks_are_told(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", *incident(), info={"config": {"processes": 2}})
    other = journal(run_dir, rank=1)
    evidence = {"module": "head", "kind": "Linear", "cause": "learning_rate", "origin": None}
    other.event(
        Finding(step=40, attempt=41, rank=1, detector=FindingKind.ORIGIN, detail="it is in head", evidence=evidence)
    )
    other.close()
    text = report(run_dir, "--markdown")
    assert "| ranks | 2 |" in text
    assert "module: head" in text


def test_checklist_after_a_crash_is_answered_from_the_run(tmp_path: Path) -> None:
    def answers(items: list[CheckedItem]) -> dict[str, CheckAnswer]:
        return {checked.item: checked.answer for checked in items}

    healthy = make_report(write(tmp_path / "healthy"))
    assert healthy.after_crash == []
    assert (healthy.verdict, healthy.sentence[:13]) == ("healthy", "The loss fell")
    resumed = CheckpointEvent(step=40, attempt=44, name="resumed", detail="resumed", values={"step": 40})
    proved = CheckpointEvent(step=40, attempt=44, name="proved", detail="the saved batch has its saved loss")
    run_dir = write(tmp_path / "resumed", *incident(), resumed, proved)
    folder = run_dir / "checkpoints" / "step-00000040"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "health.json").write_text(json.dumps({"health": "healthy"}))
    after = answers(make_report(run_dir).after_crash)
    assert after["the run was resumed from a healthy checkpoint"] is CheckAnswer.YES
    assert after["the resume was verified by a saved batch"] is CheckAnswer.YES
    assert after["the logs are analysed and a cause is named"] is CheckAnswer.YES
    (folder / "health.json").write_text(json.dumps({"health": "suspect"}))
    assert answers(make_report(run_dir).after_crash)["the run was resumed from a healthy checkpoint"] is CheckAnswer.NO


def test_what_is_no_run_is_refused_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    journal(tmp_path / "nothing").close()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_bytes(b"\0\0\0")
    (damaged / "events.jsonl").write_bytes(b"\xff\xfe{{{\n")
    for folder in (tmp_path / "empty", tmp_path / "nothing", damaged, tmp_path / "missing"):
        result = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "out.html")])
        assert result.exit_code == 2
        assert result.stderr.startswith("surefoot report: ")
        assert len(result.stderr.strip().splitlines()) == 1
        assert folder.name in result.stderr
    assert not (tmp_path / "out.html").exists()


def test_a_torn_run_is_reported_as_far_as_it_goes(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", *incident())
    with (run_dir / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"finding","step":99')
    (run_dir / "run.json").write_bytes(b"{")
    text = report(run_dir, "--markdown")
    assert "1 event lines could not be parsed" in text
    assert "run.json is unreadable" in text
    assert "learning rate too high" in text


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_only_an_earlier_report_is_replaced(name: str, tmp_path: Path) -> None:
    run_dir, out = write(tmp_path / "run"), tmp_path / name
    options = ["report", str(run_dir), "--out", str(out), *(["--markdown"] if name.endswith("md") else [])]
    for _ in range(2):
        assert CliRunner().invoke(app, options).exit_code == 0
    out.write_text("my own notes")
    refused = CliRunner().invoke(app, options)
    assert refused.exit_code == 2
    assert "surefoot did not write it" in refused.stderr
    assert out.read_text() == "my own notes"
    assert CliRunner().invoke(app, [*options, "--force"]).exit_code == 0
    assert out.read_text() != "my own notes"

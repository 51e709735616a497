"""A real run in a loop of its own: each incident is logged once, and everything else says the same about it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import surefoot
from surefoot.cli import app
from surefoot.report.report_markdown import escaped
from surefoot.story.incident_block import incident_block
from surefoot.story.run_story import RunVerdict
from surefoot.story.verbosity import VARIABLE


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def train(run_dir: Path, *, nan_at: tuple[int, ...] = (), steps: int = 90, close: bool = True, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, **options)
    for step in range(steps):
        x = torch.randn(8, 4)
        if step in nan_at:
            x[3] = float("nan")
        guard.watch(loss_of(model, x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    if close:
        guard.close()


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "surefoot" and r.levelno >= level]


def test_an_incident_is_logged_once_and_everything_says_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, nan_at=(60,), step_fn=loss_of)
    (logged,) = messages(caplog)
    story = surefoot.read(run_dir).story
    (incident,) = [i for i in story.incidents if i.refused]
    first = incident.first_cause
    assert first is not None
    assert story.main is incident
    assert story.verdict is RunVerdict.WARNING
    told_later = f"surefoot: {incident_block(incident, str(run_dir))}"
    without_pointers = [text.partition("\n  more:")[0] for text in (logged, told_later)]  # a bundle may come later
    assert without_pointers[0] == without_pointers[1], "the log says what is read later"
    assert f"bad batch of data ({first.confidence:.0%} sure)" in logged
    assert "sample 3" in logged
    assert "the refusal helped: updates are applied again" in logged
    assert str(run_dir / incident.bundle) in logged
    assert (run_dir / incident.bundle).is_dir()
    diagnosis = surefoot.diagnose(run_dir)
    assert diagnosis.causes[0].cause is first.cause
    assert diagnosis.causes[0].confidence == first.confidence
    assert diagnosis.causes[0].evidence[0] == first.evidence[0]
    assert diagnosis.onset_step == incident.step == 60
    printed = json.loads(CliRunner().invoke(app, ["diagnose", str(run_dir), "--json"]).stdout)
    assert printed["causes"][0]["cause"] == first.cause
    assert printed["story"]["incidents"][printed["story"]["main"]]["causes"][0]["evidence"][0] == first.evidence[0]
    page = CliRunner().invoke(app, ["report", str(run_dir), "--markdown", "--out", "-"]).stdout
    assert f"## WARNING: {escaped(diagnosis.sentence)}" in page


def test_repeated_incidents_do_not_become_a_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run", nan_at=tuple(range(30, 2000, 130)), steps=2000)
    blocks = [message for message in messages(caplog) if "refused the update" in message]
    assert 1 <= len(blocks) <= 8, "of each cause the 1st, 2nd, 4th, 8th"
    assert surefoot.read(tmp_path / "run").story.saved.refused == 16, "the story has all of them"


def test_a_healthy_run_logs_nothing_and_tells_its_last_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run", steps=40)
    assert messages(caplog) == []
    story = surefoot.read(tmp_path / "run").story
    assert story.verdict is RunVerdict.HEALTHY
    assert story.last_step == 40
    assert "nan" not in story.headline


def test_a_run_that_ends_in_refusals_still_tells_its_last_finite_loss(tmp_path: Path) -> None:
    train(tmp_path / "run", nan_at=(38, 39), steps=40)
    story = surefoot.read(tmp_path / "run").story
    assert story.verdict is RunVerdict.FAILED, "it did not recover before it ended"
    assert story.last_loss is not None
    assert "not known: the run ended before it showed" in story.incidents[-1].outcome
    assert "nan" not in story.headline


@pytest.mark.parametrize(("verbosity", "warnings"), [("quiet", 0), ("normal", 1), ("verbose", 2)])
def test_verbosity_by_argument_and_environment(
    verbosity: str, warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "argument", nan_at=(60,), verbosity=verbosity)
    assert len(messages(caplog)) == warnings
    caplog.clear()
    monkeypatch.setenv(VARIABLE, verbosity)
    train(tmp_path / "environment", nan_at=(60,))
    assert len(messages(caplog)) == warnings


def test_a_wrong_verbosity_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="verbosity must be 'quiet' or 'normal' or 'verbose', not 'loud'"):
        train(tmp_path / "run", verbosity="loud")
    monkeypatch.setenv(VARIABLE, "loud")
    with pytest.raises(ValueError, match=f"{VARIABLE}=loud in the environment is unknown; set it to 'quiet'"):
        train(tmp_path / "run")


def test_observing_tells_what_would_have_been_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run", nan_at=(60,), policy="observe", steps=62)
    assert "would have refused" in "\n".join(messages(caplog))
    story = surefoot.read(tmp_path / "run").story
    assert story.saved.refused == 0 or not any(a.applied for i in story.incidents for a in i.actions)

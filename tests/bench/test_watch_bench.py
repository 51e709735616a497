"""`surefoot bench watch` measures a made run, and keeps it for the next call where it is told to."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from benchmarks.commands import app
from surefoot.watch.live_run import LiveRun


def test_a_made_run_is_measured_and_kept(tmp_path: Path) -> None:
    options = ["watch", "--steps", "20000", "--layers", "3", "--folder", str(tmp_path)]
    for _ in range(2):
        done = CliRunner().invoke(app, options)
        assert done.exit_code == 0, done.output
        assert "20,000 steps x 3 layers" in done.stdout
        assert "zoom to a random range" in done.stdout
    run = LiveRun(tmp_path / "run")
    assert run.numbers.step == 20_000
    assert len(run.layers.names) == 3

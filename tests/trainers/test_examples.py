"""The examples run unchanged, and each training example survives its damaged batch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot.records import Cause, Verdict

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "plain_loop": "torch",
    "exact_data": "torchdata",
    "hf_trainer": "transformers",
    "lightning_module": "lightning",
}


HEALTHY = {"trl_grpo": "trl"}
"""Examples without a damaged batch."""


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """All examples started in parallel: most of their time is spent on imports."""
    needs = NEEDS | HEALTHY
    folders = {name: tmp_path_factory.mktemp(name) for name in needs if importlib.util.find_spec(needs[name])}
    processes = {
        name: subprocess.Popen(
            [sys.executable, str(EXAMPLES / f"{name}.py"), "run"],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, folder in folders.items()
    }
    yield {name: (process, folders[name] / "run") for name, process in processes.items()}
    for process in processes.values():
        process.kill()
        process.communicate()


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, *HEALTHY, "dead_run"}


def test_dead_run_is_diagnosed_as_in_the_guide(tmp_path):
    log = subprocess.run([sys.executable, str(EXAMPLES / "dead_run.py")], capture_output=True, check=True).stdout
    (tmp_path / "train.log").write_bytes(log)
    diagnosis = surefoot.diagnose(tmp_path / "train.log")
    guide = " ".join((EXAMPLES.parent / "docs" / "guide.md").read_text(encoding="utf-8").split())
    assert f"FAILED {diagnosis.sentence}" in guide
    assert diagnosis.causes[0].cause is Cause.LEARNING_RATE


@pytest.mark.parametrize("name", NEEDS)
def test_example_survives_its_damaged_batch(name, started):
    if name not in started:
        pytest.skip(f"{NEEDS[name]} is not installed")
    process, run_dir = started[name]
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert "all weights finite: True" in stdout
    assert "the loss is nan" in stdout
    verdicts = surefoot.read(run_dir).scalars["verdict"].tolist()
    assert len(verdicts) >= 20
    assert [v for v in verdicts if v != Verdict.APPLIED] == [Verdict.NONFINITE]


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_example_is_left_alone(name, started):
    if name not in started:
        pytest.skip(f"{HEALTHY[name]} is not installed")
    process, run_dir = started[name]
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert "decisions: []" in stdout
    scalars = surefoot.read(run_dir).scalars
    assert set(scalars["verdict"].tolist()) == {Verdict.APPLIED}
    assert -scalars["progress"][-5:].mean() > -scalars["progress"][:5].mean()

"""The examples run as they stand, and each survives its damaged batch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot.records import Verdict

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"plain_loop": "torch", "hf_trainer": "transformers", "lightning_module": "lightning"}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_example(name, tmp_path):
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), str(tmp_path / "run")],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "all weights finite: True" in done.stdout
    assert "the loss is nan" in done.stdout
    verdicts = surefoot.read(tmp_path / "run").scalars["verdict"].tolist()
    assert len(verdicts) >= 20
    assert [v for v in verdicts if v != Verdict.LANDED] == [Verdict.NONFINITE]

"""SIGKILL in the middle of `surefoot train`; the same command resumes bit-identically."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from small_runs import newest_tensors, same, small_recipe

from surefoot.cli.train import show
from surefoot.train import exit_codes


def train(recipe: str) -> subprocess.CompletedProcess[str]:
    """Run in a subprocess, in the folder of the recipe's modules."""
    return subprocess.run(
        [sys.executable, "-m", "surefoot", "train", recipe],
        check=False,
        cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_killed_run_resumes_to_the_same_weights_and_moments(tmp_path: Path) -> None:
    model = {"factory": "surefoot.models:decoder", "vocab": 256, "width": 16, "layers": 1, "heads": 2, "context": 24}
    parts = {"model": model | {"dropout": 0.1}, "batch": {"size": 2, "accumulate": 4}, "steps": 20}
    loss = {
        "factory": "custom_parts:failing",
        "at": 46,
        "how": "kill",
        "folder": str(tmp_path),
    }  # inside an accumulation group
    recipe = small_recipe(tmp_path, **parts, loss=loss)
    killed = train(recipe)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = train(recipe)
    assert resumed.returncode == exit_codes.DONE, resumed.stderr
    assert ", resuming from " in resumed.stdout
    assert show(small_recipe(tmp_path / "uninterrupted", **parts), ()) == exit_codes.DONE
    assert same(newest_tensors(tmp_path / "run"), newest_tensors(tmp_path / "uninterrupted" / "run"))

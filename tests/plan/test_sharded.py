"""The memory planned for FSDP against what FSDP allocates as one of 8 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import surefoot

SCRIPT = Path(__file__).with_name("sharded_step.py")


def test_planned_shards_are_never_too_few_and_at_most_a_quarter_too_many() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(surefoot.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    ratios = {case: planned / real for case, (planned, real) in json.loads(done.stdout).items()}
    assert all(1.0 <= ratio <= 1.25 for ratio in ratios.values()), ratios

"""Run test_kernels.py without a CUDA device, in Triton's interpreter, which is selected before the import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are tested on the device itself")
def test_kernels_in_the_interpreter() -> None:
    here = Path(__file__).parent
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(here / "test_kernels.py")]
    command += ["-k", "not repeatable and not never_waits"]  # these two need a CUDA device
    done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-1000:]

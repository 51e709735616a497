from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cpu") if request.param == "cpu" else request.getfixturevalue("cuda")


@pytest.fixture
def kernels() -> torch.device:
    """Where Triton kernels can run: a CUDA device, or the CPU inside Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; test_interpreter.py runs this in Triton's interpreter")
    return torch.device("cuda", torch.cuda.current_device())

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "guard"), str(HERE.parent / "state")]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`surefoot.attach` into the test's own directory, closed at the end."""
    guards: list[surefoot.Guard] = []

    def attach(model: Any, optimizer: Any, **options: Any) -> surefoot.Guard:
        guard = surefoot.attach(model, optimizer, **({"run_dir": tmp_path / "run"} | options))
        guards.append(guard)
        return guard

    yield attach
    for guard in guards:
        guard.close()


@pytest.fixture
def read(tmp_path: Path) -> Callable[[], surefoot.Run]:
    """What the test's run directory holds now."""
    return lambda: surefoot.read(tmp_path / "run")

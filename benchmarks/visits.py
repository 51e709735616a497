"""`surefoot bench visits`: how many of surefoot's source files and functions one healthy step and one save go through.

This counts what a reader has to follow, not time. A profile hook (`sys.setprofile`) records every surefoot function
that is called while a small MLP trains with fused=False AdamW, attached with resume=True and a data loader.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import surefoot
from surefoot.checkpoint.store import CheckpointStore
from surefoot.data import make_loader
from surefoot.guard.guard import Guard

PACKAGE = str(Path(surefoot.__file__).resolve().parent)
WARMUP_STEPS = 40
"""Steps before anything is counted: by then kernels, buffers and background threads exist."""
STEPS = 15
"""Steps counted one by one; the table shows the median."""
SAVE_EVERY = WARMUP_STEPS + STEPS + 5
"""The first save of the run comes after the counted steps."""
SAVE_TIMEOUT_SECONDS = 60.0
_WIDTH = 16


@dataclass(slots=True)
class Visits:
    """The distinct surefoot functions called in a window, in the training thread and in any thread."""

    training_thread: set[CodeType] = field(default_factory=set)
    all_threads: set[CodeType] = field(default_factory=set)

    def files(self, *, all_threads: bool = False) -> list[str]:
        codes = self.all_threads if all_threads else self.training_thread
        return sorted({str(Path(code.co_filename).relative_to(PACKAGE)) for code in codes})

    def functions(self, *, all_threads: bool = False) -> int:
        return len(self.all_threads if all_threads else self.training_thread)

    def as_json(self) -> dict[str, Any]:
        return {
            "files": len(self.files()),
            "functions": self.functions(),
            "files_all_threads": len(self.files(all_threads=True)),
            "functions_all_threads": self.functions(all_threads=True),
            "visited": self.files(all_threads=True),
        }


class VisitCounter:
    """A profile hook for all threads; it records only inside `counting`."""

    def __init__(self) -> None:
        self._visits: Visits | None = None
        self._training_thread = threading.get_ident()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook this thread and every thread that starts from here on."""
        before = sys.getprofile()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def counting(self) -> Iterator[Visits]:
        visits = self._visits = Visits()
        try:
            yield visits
        finally:
            self._visits = None

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        visits, code = self._visits, frame.f_code
        if visits is None or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        visits.all_threads.add(code)
        if threading.get_ident() == self._training_thread:
            visits.training_thread.add(code)


def measure() -> dict[str, Visits]:
    """Visits of a median step ("step") and of the steps during which one checkpoint is saved ("save")."""
    torch.manual_seed(0)
    counter = VisitCounter()
    with tempfile.TemporaryDirectory() as folder, counter.installed():
        model = nn.Sequential(nn.Linear(_WIDTH, 32), nn.GELU(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False)
        loader = make_loader(torch.randn(4096, _WIDTH), 16, seed=0)  # pyright: ignore[reportArgumentType]
        policy = surefoot.Policy(save_every=SAVE_EVERY, save_seconds=3600.0)
        run: dict[str, Any] = {"run_dir": folder, "loader": loader, "resume": True, "policy": policy}
        with surefoot.attach(model, optimizer, **run) as guard:
            step = _stepper(model, optimizer, loader, guard)
            for _ in range(WARMUP_STEPS):
                step()
            steps: list[Visits] = []
            for _ in range(STEPS):
                with counter.counting() as visits:
                    step()
                steps.append(visits)
            with counter.counting() as save:
                _step_until_saved(step, Path(folder))
    median = statistics.median_low(visits.functions() for visits in steps)
    return {"step": next(v for v in steps if v.functions() == median), "save": save}


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, guard: Guard) -> Callable[[], None]:
    batches: Iterator[Tensor] = iter(loader)

    def step() -> None:
        batch = next(batches)
        loss = guard.watch(model(batch).square().mean(), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _step_until_saved(step: Callable[[], None], run_dir: Path) -> None:
    """Train until the first checkpoint is on disk."""
    store = CheckpointStore(run_dir / "checkpoints")
    deadline = time.monotonic() + SAVE_TIMEOUT_SECONDS
    while not store.all():
        if time.monotonic() > deadline:
            raise RuntimeError(f"bench visits: no checkpoint was saved within {SAVE_TIMEOUT_SECONDS:.0f} s")
        step()
        time.sleep(0.01)


def report(visits: dict[str, Visits]) -> str:
    """The table as Markdown."""
    lines = [
        "Distinct surefoot source files and functions called; the save includes the steps that train beside it.",
        "",
        "| | files | functions | files, all threads | functions, all threads |",
        "|---|---|---|---|---|",
    ]
    for name, counts in visits.items():
        files, files_all = len(counts.files()), len(counts.files(all_threads=True))
        lines.append(
            f"| {name} | {files} | {counts.functions()} | {files_all} | {counts.functions(all_threads=True)} |"
        )
    return "\n".join(lines)

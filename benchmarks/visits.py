"""`surefoot bench visits`: how many of surefoot's source files and functions one healthy step and one save go through.

This counts what a reader has to follow, not time. A profile hook (`sys.setprofile`) records every surefoot function
that is called while a small MLP trains on the CPU with AdamW. The plain case is two lines in somebody's own loop, with
`resume=True` where a save is counted; the other has a loader of surefoot's as well.
"""

from __future__ import annotations

import itertools
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
from surefoot.data import make_loader
from surefoot.guard.guard import Guard
from surefoot.journal.writer import WriterThread
from surefoot.records import CheckpointEvent, Event

PACKAGE = str(Path(surefoot.__file__).resolve().parent)
WARMUP_STEPS = 120
"""Steps before anything is counted: by then kernels, buffers and background threads exist, and the start of the run,
which is watched more closely, is over."""
STEPS = 15
"""Steps counted one by one; the table shows the median."""
SAVE_EVERY = 47
"""The first two saves of the run are part of the warm-up, the third comes after the counted steps."""
NEVER = 10**6
"""Steps between two snapshots, looks at the machine, and measures of the weights, where a save is counted: without."""
PAUSE_SECONDS = 0.005
"""In every step, so that background threads get on, and waiting for a save is no change of pace."""
SAVE_TIMEOUT_SECONDS = 60.0
STEP, SAVE = "step", "save"
LOADER_STEP, LOADER_SAVE = "step, with loader and resume", "save, with loader"
_SAVES = (SAVE, LOADER_SAVE)
_WIDTH, _BATCH = 16, 16


@dataclass(slots=True)
class Visits:
    """The distinct surefoot functions called in a window, in the training thread and in any thread."""

    training_thread: set[CodeType] = field(default_factory=set)
    all_threads: set[CodeType] = field(default_factory=set)

    def files(self, *, all_threads: bool = False) -> list[str]:
        return list(self.by_file(all_threads=all_threads))

    def functions(self, *, all_threads: bool = False) -> int:
        return len(self.all_threads if all_threads else self.training_thread)

    def by_file(self, *, all_threads: bool = False) -> dict[str, list[str]]:
        """The names of the functions called in each file, in the order in which they stand there."""
        codes = self.all_threads if all_threads else self.training_thread
        named: dict[str, list[str]] = {}
        for code in sorted(codes, key=lambda code: (code.co_filename, code.co_firstlineno, code.co_qualname)):
            named.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), []).append(code.co_qualname)
        return named

    def by_package(self, *, all_threads: bool = False) -> dict[str, tuple[int, int]]:
        """Files and functions visited in each package; a module at the root counts as a package of its own."""
        counts: dict[str, tuple[int, int]] = {}
        for name, functions in self.by_file(all_threads=all_threads).items():
            files, total = counts.get(package := name.split("/")[0], (0, 0))
            counts[package] = files + 1, total + len(functions)
        return counts

    def as_json(self) -> dict[str, Any]:
        return {
            "files": len(self.files()),
            "functions": self.functions(),
            "files_all_threads": len(self.files(all_threads=True)),
            "functions_all_threads": self.functions(all_threads=True),
            "visited": self.by_file(),
            "visited_all_threads": self.by_file(all_threads=True),
        }


class VisitCounter:
    """A profile hook for all threads; it records only inside `counting`.

    The journal's thread is left out: it writes rows every few steps, whether there is a save or not.
    """

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
        if threading.get_ident() == self._training_thread:
            visits.training_thread.add(code)
        elif isinstance(threading.current_thread(), WriterThread):
            return
        visits.all_threads.add(code)


def measure() -> dict[str, Visits]:
    """Visits of a median step, and of the steps during which one checkpoint is saved, in both cases."""
    counts = {STEP: _measure(loader=False, resume=False)[0], SAVE: _measure(loader=False, resume=True)[1]}
    step, save = _measure(loader=True, resume=True)
    return {name: v for name, v in {**counts, LOADER_STEP: step, LOADER_SAVE: save}.items() if v is not None}


def _measure(*, loader: bool, resume: bool) -> tuple[Visits, Visits | None]:
    """Visits of a median step and, with `resume`, of the steps during which one checkpoint is saved."""
    torch.manual_seed(0)
    counter = VisitCounter()
    with tempfile.TemporaryDirectory() as folder, counter.installed():
        model = nn.Sequential(nn.Linear(_WIDTH, 32), nn.GELU(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = torch.randn(8192, _WIDTH + 1)
        batches: Any = make_loader(data, _BATCH, seed=0) if loader else itertools.cycle(data.split(_BATCH))  # pyright: ignore[reportArgumentType]
        options: dict[str, Any] = {"loader": batches} if loader else {}
        if resume:
            policy = surefoot.Policy(
                save_every=SAVE_EVERY, save_seconds=3600.0, snapshot_every=NEVER, system_every=NEVER
            )
            options |= {"resume": True, "policy": policy}
        with surefoot.attach(model, optimizer, run_dir=folder, **options) as guard:
            step = _stepper(model, optimizer, batches, guard)
            for _ in range(WARMUP_STEPS):
                step()
            if resume:
                _train_until_saved(step, guard)
            steps: list[Visits] = []
            for _ in range(STEPS):
                with counter.counting() as visits:
                    step()
                steps.append(visits)
            save = None
            if resume:
                with counter.counting() as save:
                    _train_until_saved(step, guard)
    median = statistics.median_low(visits.functions() for visits in steps)
    return next(visits for visits in steps if visits.functions() == median), save


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, guard: Guard) -> Callable[[], None]:
    batches: Iterator[Tensor] = iter(loader)

    def step() -> None:
        batch = next(batches)
        inputs, noise = batch[:, :-1], batch[:, -1:]  # noise keeps the loss from falling to zero
        loss = guard.watch((model(inputs) - inputs.sum(1, keepdim=True) - noise).square().mean(), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(PAUSE_SECONDS)

    return step


def _train_until_saved(step: Callable[[], None], guard: Guard) -> None:
    """Train until the next checkpoint is on disk and recorded."""
    saved: list[Event] = []
    guard.on_event(lambda event: saved.append(event) if _is_save(event) else None)
    deadline = time.monotonic() + SAVE_TIMEOUT_SECONDS
    while not saved:
        if time.monotonic() > deadline:
            raise RuntimeError(f"bench visits: no checkpoint was saved within {SAVE_TIMEOUT_SECONDS:.0f} s")
        step()


def _is_save(event: Event) -> bool:
    return isinstance(event, CheckpointEvent) and event.name == "saved"


def report(visits: dict[str, Visits], *, files: bool = False) -> str:
    """The tables as Markdown; with `files`, also every function by file."""
    lines = [
        "Distinct surefoot source files and functions called, without the journal's thread; a save includes steps.",
        "",
        "| | files | functions | files, all threads | functions, all threads |",
        "|---|---|---|---|---|",
    ]
    for name, counts in visits.items():
        everywhere = len(counts.files(all_threads=True)), counts.functions(all_threads=True)
        lines.append(f"| {name} | {len(counts.files())} | {counts.functions()} | {everywhere[0]} | {everywhere[1]} |")
    lines += ["", "Files / functions of each package: of a step in the training thread, of a save in all threads.", ""]
    packages = {name: counts.by_package(all_threads=name in _SAVES) for name, counts in visits.items()}
    columns = sorted(set(itertools.chain.from_iterable(packages.values())))
    lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, counted in packages.items():
        cells = [f"{counted[p][0]} / {counted[p][1]}" if p in counted else "" for p in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for name, counts in visits.items() if files else ():
        lines += ["", f"{name}:"]
        for file, functions in counts.by_file(all_threads=name in _SAVES).items():
            lines += [f"  {file}", *(f"      {function}" for function in functions)]
    return "\n".join(lines)

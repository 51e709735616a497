"""`surefoot bench host`: host time that surefoot adds to a step, part by part; it limits small models on fast devices.

A bare and an attached model of many tiny tensors train in turns, so that there is next to nothing to compute. The
parts of the attached loop are timed at their entry points; time spent in a nested part counts for the nested one only.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import surefoot
from benchmarks.overhead import CLIP, describe_machine
from surefoot.checkpoint.snapshots import SnapshotRing
from surefoot.gate.gate import Gate
from surefoot.guard import metrics_reader, step_pipeline
from surefoot.guard.attached import AttachedGuard
from surefoot.guard.recovery import Recovery
from surefoot.journal.writer import Journal
from surefoot.judge.judge import Judge
from surefoot.measure.block_layout import AsyncReadback
from surefoot.measure.grad_stats import GradStats

TENSORS = (75, 300)
WIDTH = 8
"""Values per tensor."""
STEPS, WARMUP_STEPS = 400, 50
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "watch": ((AttachedGuard, "watch"), (AttachedGuard, "_backward_began"), (AttachedGuard, "_backward_ended")),
    "measure": ((GradStats, "measure"), (GradStats, "gather_totals"), (GradStats, "measure_weights")),
    "gate": ((AttachedGuard, "_before_step"), (Gate, "apply"), (Gate, "after_step")),
    "readback": (
        (AttachedGuard, "_after_step"),
        (AsyncReadback, "send"),
        (step_pipeline.StepPipeline, "arrived_blocks"),
        (metrics_reader, "step_metrics_from"),
    ),
    "judge": ((Judge, "update"),),
    "journal": ((Journal, "row"),),
    "snapshots": (
        (Recovery, "iteration_ended"),
        (Recovery, "first_forward_began"),
        (SnapshotRing, "before_update"),
        (SnapshotRing, "mark_good"),
    ),
}
"""The methods that make up each part."""


@dataclass(frozen=True)
class HostOverhead:
    """Microseconds per step: of the bare loop, and of each part that surefoot adds."""

    tensors: int
    bare: float
    parts: dict[str, float]
    total: float
    """How much longer the attached loop takes than the bare one."""


class PartTimer:
    """Adds up the time of each part; time in a nested part counts for the nested one only."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._inner = [0.0]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.thread_time()  # CPU time: waiting for the device or another process does not count
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.thread_time() - start
                self.spent[part] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return wrapper


class ManyTensors(nn.Module):
    """As many parameter tensors as a decoder has, each tiny."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(tensors)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([p * x for p in self.all]).square().mean()


class TinyLoop:
    """A training loop over `ManyTensors`, bare or attached."""

    def __init__(self, tensors: int, device: str, folder: str | None) -> None:
        torch.manual_seed(0)
        self.model = ManyTensors(tensors).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.ones(WIDTH, device=device)
        tokens = torch.ones(WIDTH, dtype=torch.int64, device=device)
        guard = None if folder is None else surefoot.attach(self.model, self.optimizer, run_dir=folder, clip=CLIP)
        self.close = (lambda: None) if guard is None else guard.close
        self.watch = (lambda loss: loss) if guard is None else (lambda loss: guard.watch(loss, tokens))
        self.clips = guard is None

    def step(self) -> float:
        """Train one step and return its host seconds."""
        start = time.perf_counter()
        self.watch(self.model(self.batch)).backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


def measure(tensors: int, device: str, *, steps: int = STEPS) -> HostOverhead:
    """Time both loops in turns, then the parts of the attached one; all results are medians."""
    with tempfile.TemporaryDirectory() as folder:
        bare, attached = TinyLoop(tensors, device, None), TinyLoop(tensors, device, folder)
        pairs = [(bare.step(), attached.step()) for _ in range(WARMUP_STEPS + steps)][WARMUP_STEPS:]
        attached.close()
    timer, micros = PartTimer(), dict[str, list[float]]()
    with ExitStack() as patches, tempfile.TemporaryDirectory() as folder:
        for part, methods in PARTS.items():
            for owner, name in methods:
                patches.enter_context(mock.patch.object(owner, name, timer.timed(part, getattr(owner, name))))
        attached = TinyLoop(tensors, device, folder)
        for number in range(WARMUP_STEPS + steps):
            timer.spent.update(dict.fromkeys(PARTS, 0.0))
            attached.step()
            for part, seconds in timer.spent.items() if number >= WARMUP_STEPS else ():
                micros.setdefault(part, []).append(1e6 * seconds)
        attached.close()
    return HostOverhead(
        tensors,
        1e6 * statistics.median(b for b, _ in pairs),
        {part: statistics.median(values) for part, values in micros.items()},
        1e6 * statistics.median(a - b for b, a in pairs),
    )


def report(results: list[HostOverhead], device: str) -> str:
    """The table as Markdown."""
    names = list(PARTS)
    lines = [
        f"Host microseconds per step, medians. Machine: {describe_machine(device)}.",
        "",
        f"| tensors | bare, clipped | {' | '.join(names)} | attached minus bare | ratio |",
        "|---" * (len(names) + 4) + "|",
    ]
    for r in results:
        parts = " | ".join(f"{r.parts[name]:.0f}" for name in names)
        ratio = 1 + r.total / r.bare
        lines.append(f"| {r.tensors} | {r.bare:.0f} | {parts} | {r.total:+.0f} | {ratio:.2f} |")
    return "\n".join(lines)


def main(device: str | None = None, *, steps: int = STEPS) -> str:
    """The table for a device."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"bench host: no device {device!r} found. Use --device cpu.")

    return report([measure(tensors, device, steps=steps) for tensors in TENSORS], device)

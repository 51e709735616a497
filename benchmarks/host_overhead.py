"""Host time that being watched adds to a step, part by part: what a small model on a fast device waits for.

A model of many tiny tensors is trained twice in turns, bare and attached, so that next to nothing is computed. The
parts of the attached loop are timed where they begin and end; what one part calls of another counts for that other.
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
from benchmarks.overhead import CLIP, machine
from surefoot.checkpoint.snapshots import SnapshotRing
from surefoot.gate.gate import Gate
from surefoot.guard import metrics_reader, step_pipeline
from surefoot.guard.attached import AttachedGuard
from surefoot.guard.recovery import Recovery
from surefoot.journal.writer import Journal
from surefoot.judge.judge import Judge
from surefoot.measure.grad_stats import GradStats
from surefoot.measure.readback import AsyncReadback

TENSORS = (75, 300)
WIDTH = 8
"""Values of a tensor."""
STEPS, WARM = 400, 50
WHERE: dict[str, tuple[tuple[Any, str], ...]] = {
    "watch": ((AttachedGuard, "watch"), (AttachedGuard, "_backward_began"), (AttachedGuard, "_backward_ended")),
    "measure": ((GradStats, "measure"), (GradStats, "totals"), (GradStats, "measure_weights")),
    "gate": ((AttachedGuard, "_before_step"), (Gate, "apply"), (Gate, "after"), (Gate, "refresh")),
    "mailbox": (
        (AttachedGuard, "_after_step"),
        (AsyncReadback, "send"),
        (step_pipeline.StepPipeline, "arrived"),
        (metrics_reader, "step_metrics_from"),
    ),
    "judge": ((Judge, "update"),),
    "journal": ((Journal, "row"),),
    "ring": ((Recovery, "round_ended"), (Recovery, "begin"), (SnapshotRing, "settle"), (SnapshotRing, "prove")),
}
"""What belongs to each part."""


@dataclass(frozen=True)
class Result:
    """Microseconds a step: of the bare loop, and of each part that is added to it."""

    tensors: int
    bare: float
    parts: dict[str, float]
    total: float
    """What the attached loop takes longer than the bare one."""


class Watch:
    """Adds up the time of each part; of a part inside another only the inner one's."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(WHERE, 0.0)
        self._inner = [0.0]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.thread_time()  # waiting for the device, or for another process, is no work
            try:
                return call(*args, **kwargs)
            finally:
                took = time.thread_time() - start
                self.spent[part] += took - self._inner.pop()
                self._inner[-1] += took

        return wrapper


class Many(nn.Module):
    """As many tensors as a decoder has, and hardly anything in them."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(tensors)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([p * x for p in self.all]).square().mean()


class Loop:
    """One training loop over such a model, bare or attached."""

    def __init__(self, tensors: int, device: str, folder: str | None) -> None:
        torch.manual_seed(0)
        self.model = Many(tensors).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.ones(WIDTH, device=device)
        tokens = torch.ones(WIDTH, dtype=torch.int64, device=device)
        guard = None if folder is None else surefoot.attach(self.model, self.optimizer, run_dir=folder, clip=CLIP)
        self.close = (lambda: None) if guard is None else guard.close
        self.watch = (lambda loss: loss) if guard is None else (lambda loss: guard.watch(loss, tokens))
        self.clips = guard is None

    def step(self) -> float:
        """Seconds the host is busy with one step."""
        start = time.perf_counter()
        self.watch(self.model(self.batch)).backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


def measure(tensors: int, device: str, *, steps: int = STEPS) -> Result:
    """Both loops in turns, first without and then with a watch on the parts; medians."""
    with tempfile.TemporaryDirectory() as folder:
        bare, attached = Loop(tensors, device, None), Loop(tensors, device, folder)
        pairs = [(bare.step(), attached.step()) for _ in range(WARM + steps)][WARM:]
        attached.close()
    watch, found = Watch(), dict[str, list[float]]()
    with ExitStack() as held, tempfile.TemporaryDirectory() as folder:
        for part, places in WHERE.items():
            for home, name in places:
                held.enter_context(mock.patch.object(home, name, watch.timed(part, getattr(home, name))))
        attached = Loop(tensors, device, folder)
        for number in range(WARM + steps):
            watch.spent.update(dict.fromkeys(WHERE, 0.0))
            attached.step()
            for part, spent in watch.spent.items() if number >= WARM else ():
                found.setdefault(part, []).append(1e6 * spent)
        attached.close()
    return Result(
        tensors,
        1e6 * statistics.median(b for b, _ in pairs),
        {part: statistics.median(spent) for part, spent in found.items()},
        1e6 * statistics.median(a - b for b, a in pairs),
    )


def report(results: list[Result], device: str) -> str:
    """The table as Markdown."""
    names = list(WHERE)
    lines = [
        f"Microseconds of the host a step, medians. Machine: {machine(device)}.",
        "",
        f"| tensors | bare, clipped | {' | '.join(names)} | attached less bare | ratio |",
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
        raise ValueError(f"bench host: there is no device {device!r} here. Use --device cpu.")
    return report([measure(tensors, device, steps=steps) for tensors in TENSORS], device)

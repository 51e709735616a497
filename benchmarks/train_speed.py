"""`surefoot bench train`: tokens per second of `surefoot train` against a hand-written loop of the same model."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.overhead import describe_machine
from surefoot import parallel
from surefoot.guard.attach import Guard
from surefoot.models import Decoder
from surefoot.sinks.console import RunConsole
from surefoot.sinks.sink import Sinks
from surefoot.train.accumulation import to_device
from surefoot.train.build import RunParts, build
from surefoot.train.factories import call_factory
from surefoot.train.loop import train
from surefoot.train.recipe import Recipe, load
from surefoot.train.reporter import Reporter
from surefoot.train.session import Invocation, attach_guard

PEAK_FLOPS = {"H200": 990e12, "H100": 990e12, "A100": 312e12}
"""Peak dense bfloat16 FLOP/s by device, as specified by the vendor."""
BLOCKS = 7
"""Pairs of blocks, alternating between the engine and the hand-written loop; the first pair is warmup."""
SAVE_EVERY = 4
"""Blocks between checkpoints: far more often than in a real run."""
_CACHED_BATCHES = 20
"""Batches that the hand-written loop cycles through: no data loader is faster."""


class MeasurementDone(Exception):
    """All blocks are measured."""


def main(source: str, overrides: Sequence[str], seconds: float, say: Callable[[str], None]) -> str:
    """The table as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"run_dir={Path(folder) / 'run'}",
            "evaluation.every=0",
            "sample.tokens=0",
            "steps=1000000",
            "epochs=null",
        ]
        recipe = load(source, [*overrides, *fixed])[0]
        world = parallel.init_distributed(recipe.device, recipe.parallel.timeout)
        parts = build(recipe, world)
        bare = HandWrittenLoop(recipe, parts)
        say(f"{parts.parameters / 1e6:.0f} M parameters on {describe_machine(world.device.type)}; warming up")
        size = max(3, round(seconds / BLOCKS / 2 / bare.seconds_per_update()))
        saving = recipe.model_copy(
            update={"checkpoints": recipe.checkpoints.model_copy(update={"every": size * SAVE_EVERY})}
        )
        with attach_guard(parts, Invocation(source), saving) as guard:
            blocks = BlockTimer(parts, bare, size, say)
            with contextlib.suppress(MeasurementDone):
                train(parts, guard, blocks)
        return _table(parts, blocks)


class HandWrittenLoop:
    """A typical hand-written loop: autocast, a compiled model, clipping, a fused optimizer, an lr schedule."""

    def __init__(self, recipe: Recipe, parts: RunParts) -> None:
        self._device = parts.world.device
        torch.manual_seed(recipe.seed)
        self._model: nn.Module = call_factory("model", recipe.model).to(self._device)
        self._forward = torch.compile(self._model) if recipe.speed.compile else self._model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), recipe.optimizer.lr, fused=True)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, 1_000_000)
        self._dtype = parts.precision.compute
        self._accumulate = recipe.batch.accumulate
        self._batches: Iterator[Any] = itertools.cycle(list(itertools.islice(parts.data.train_loader, _CACHED_BATCHES)))

    def step(self) -> None:
        half = self._dtype is not torch.float32
        for _ in range(self._accumulate):
            batch = to_device(next(self._batches), self._device)
            with torch.autocast(self._device.type, self._dtype, enabled=half):
                loss = self._forward(batch["inputs"], batch["targets"]) / (batch["count"] * self._accumulate)
            loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()

    def seconds_for(self, updates: int) -> float:
        """Seconds for this many updates."""
        _synchronize(self._device)
        start = time.perf_counter()
        for _ in range(updates):
            self.step()
        _synchronize(self._device)
        return time.perf_counter() - start

    def seconds_per_update(self) -> float:
        """Seconds per update after warmup."""
        self.seconds_for(3)
        return self.seconds_for(3) / 3


@dataclass(slots=True)
class _BlockSeconds:
    engine: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)


class BlockTimer(Reporter):
    """Is called at every update of the engine, and runs a block of the hand-written loop in between."""

    def __init__(self, parts: RunParts, bare: HandWrittenLoop, size: int, say: Callable[[str], None]) -> None:
        console = RunConsole(parts.recipe.name, total_steps=parts.total, every=parts.recipe.log.every, is_first=False)
        super().__init__(console, Sinks({}), parts.total)
        self._device, self._bare, self._say = parts.world.device, bare, say
        self.size = size
        self.measured = _BlockSeconds()
        self.first_update_seconds = 0.0
        """Seconds from the start of this process to the first update."""
        self._count = -2  # the first two updates compile
        self._began = 0.0

    def updated(self, guard: Guard, tokens: int | None) -> None:
        super().updated(guard, tokens)
        if not self.first_update_seconds:
            _synchronize(self._device)
            self.first_update_seconds = time.time() - _process_start_time()
        self._count += 1
        if self._count == self.size:
            _synchronize(self._device)
            self.measured.engine.append(time.perf_counter() - self._began)
            self.measured.bare.append(self._bare.seconds_for(self.size))
            done = len(self.measured.engine)
            self._say(f"{done} of {BLOCKS} blocks of {self.size} updates")
            if done == BLOCKS:
                raise MeasurementDone
            self._count = 0
        if self._count == 0:
            _synchronize(self._device)
            self._began = time.perf_counter()


def _table(parts: RunParts, blocks: BlockTimer) -> str:
    recipe, device = parts.recipe, parts.world.device
    engine, bare = blocks.measured.engine[1:], blocks.measured.bare[1:]
    ratios = [b / e for e, b in zip(engine, bare, strict=True)]
    tokens = recipe.batch.size * recipe.batch.accumulate * recipe.data.context * blocks.size
    compiled = "compiled" if recipe.speed.compile else "not compiled"
    setup = (
        f"{recipe.name}: {parts.parameters / 1e6:.0f} M parameters, {recipe.batch.size} x {recipe.data.context} tokens"
        f" x {recipe.batch.accumulate}, {recipe.precision.compute}, {compiled}; {describe_machine(device.type)}"
    )
    lines = [
        setup,
        f"first update {blocks.first_update_seconds:.1f} s after process start, hand-written loop's warmup included",
        "| loop | tokens/s | relative to hand-written | model FLOP utilisation |",
        "|---|---|---|---|",
    ]
    for name, times in (("surefoot train, guard and checkpoints on", engine), ("hand-written", bare)):
        speed = tokens / statistics.median(times)
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if times is engine else "1"
        lines.append(f"| {name} | {speed:,.0f} | {ratio} | {_utilisation(parts, speed)} |")
    return "\n".join(lines)


def _utilisation(parts: RunParts, speed: float) -> str:
    """Model FLOPs, 6 N + 12 L d T per token, relative to the device's peak."""
    model = parallel.unwrap_model(parts.model)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in _device_name(parts.world.device)), None)
    if peak is None or not isinstance(model, Decoder):
        return "-"
    config = model.config
    flops_per_token = 6 * parts.parameters + 12 * config.layers * config.width * parts.recipe.data.context
    return f"{flops_per_token * speed / peak:.1%}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _process_start_time() -> float:
    import psutil

    return psutil.Process(os.getpid()).create_time()

"""`surefoot bench judge` and `bench rewind`: time to judge one row, to take a snapshot and to rewind to it; how often
snapshots are taken in training, how many updates a rewind then loses, and how long trials take from a suspicion to the
decision."""

from __future__ import annotations

import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import surefoot
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.records import LAYER_STATS, NAN, StepMetrics

DAMAGED_AT, MAX_UPDATES = 115, 150
"""The update before which weights are damaged, and how long a rewind is waited for."""
DAMAGE = 10.0
"""Factor on all matrices."""
SMALL_BATCH = 2, 128
"""Samples and tokens per batch on the CPU, and where `bench overhead` does not train this size."""
TRIAL_BATCH = {"tiny": (16, 256)}
"""The same where trials are timed: of the recipe lm-tiny."""


def judge_latency(tensors: int = 300, rows: int = 2000) -> str:
    """Microseconds to judge one row of a healthy run on this host."""
    rng, noise = random.Random(0), np.random.default_rng(0)
    judge = Judge(Policy(), [f"blocks.{k // 12}.mlp.{k % 12}.weight" for k in range(tensors)])
    metrics = [_row(k, rng) for k in range(rows)]
    layers = [np.exp(0.2 * noise.normal(size=(tensors, len(LAYER_STATS)))).astype(np.float32) for _ in range(64)]
    for stats in layers:
        stats[:, LAYER_STATS.index("zeros")] = stats[:, LAYER_STATS.index("nonfinite")] = 0.0
    micros: list[float] = []
    for k, row in enumerate(metrics):
        start = time.perf_counter()
        judge.update(row, layers[k % len(layers)])
        micros.append(1e6 * (time.perf_counter() - start))
    median, p99 = statistics.median(micros[200:]), statistics.quantiles(micros[200:], n=100)[-1]
    return (
        f"judge: {median:.0f} us per row of {tensors} tensors (median of {rows - 200}; 99th percentile {p99:.0f}); "
        f"{platform.machine()}, Python {platform.python_version()}"
    )


def _row(step: int, rng: random.Random) -> StepMetrics:
    return StepMetrics(
        step=step,
        attempt=step,
        time=0.1 * step,
        loss=2.0 * 0.9999**step + 0.1 * rng.gauss(0, 1),
        norm=2.0 ** (0.2 * rng.gauss(0, 1)),
        nonfinite=0.0,
        lr=1e-3,
        momentum=0.9,
        update_ratio=1e-3 if step % 100 == 0 else NAN,
        seconds=0.1,
        data_wait=0.001,
        samples=8.0,
        memory=1e9,
    )


def rewind_latency(size: str = "124m", device: str | None = None) -> str:
    """Milliseconds to take a full snapshot of a decoder with AdamW, and to rewind to it."""
    import torch

    from benchmarks.overhead import describe_machine
    from surefoot.checkpoint.snapshot_memory import format_bytes
    from surefoot.checkpoint.snapshots import SnapshotRing
    from surefoot.checkpoint.train_state import TrainState
    from surefoot.models.decoder import SIZES, Decoder, count_parameters

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = Decoder(SIZES[size]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()

    def timed(call: Callable[[], object]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    ring = SnapshotRing(TrainState(model, [optimizer]))
    takes = [timed(lambda k=k: ring.take(k, k)) for k in range(8)][3:]
    ring.mark_good(8)
    snapshot = ring.newest_good()
    if snapshot is None:
        return f"rewind: {ring.describe()}"
    rewinds = [timed(lambda snapshot=snapshot: ring.rewind(snapshot)) for _ in range(8)][1:]
    return (
        f"rewind: {statistics.median(rewinds):.1f} ms (max {max(rewinds):.1f}), taking the snapshot "
        f"{statistics.median(takes):.1f} ms; {count_parameters(model) / 1e6:.0f} M parameters with AdamW, "
        f"{format_bytes(snapshot.copy.nbytes)} in {'device' if snapshot.copy.location == 'device' else 'host'} memory; "
        f"{describe_machine(device)}"
    )


def updates_lost(size: str = "124m", device: str | None = None) -> str:
    """How often snapshots are taken when a decoder is trained, what that costs, and how many updates a rewind loses
    after weights were damaged, by the rules alone."""
    import torch

    from benchmarks.overhead import BATCH, OverheadCase, OverheadLoop

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    samples, tokens = BATCH[device].get(size, SMALL_BATCH) if device == "cuda" else SMALL_BATCH
    loop = OverheadLoop(OverheadCase(size, device=device, batch=(samples, tokens)))
    with tempfile.TemporaryDirectory() as folder:
        rewinds: list[int] = []
        with surefoot.attach(loop.model, loop.optimizers, run_dir=folder, clip=1.0) as guard:
            guard.on_event(lambda e: rewinds.append(e.attempt) if getattr(e, "name", "") == "rewound" else None)
            for update in range(MAX_UPDATES):
                if rewinds:
                    break
                if update == DAMAGED_AT:
                    with torch.no_grad():
                        for p in loop.model.parameters():
                            p.mul_(DAMAGE if p.dim() > 1 else 1.0)
                loss, batch = loop.loss()
                guard.watch(loss, batch).backward()
                loop.finish()
        events = surefoot.read(folder).events
    often = [e["detail"].rpartition("; ")[2] for e in events if e.get("name") == "ring"][-1]
    where = f"training {samples} x {tokens} tokens, {often}"
    rewound = next((e for e in events if e.get("name") == "rewound"), None)
    if rewound is None:
        return f"{where}; weights damaged before update {DAMAGED_AT} were not undone"
    held = rewound["values"]["attempt"] + 1
    return (
        f"{where}; weights damaged before update {DAMAGED_AT}: rewound {rewound['attempt'] + 1 - DAMAGED_AT} updates "
        f"later to update {held}, {DAMAGED_AT - held} good updates lost"
    )


def decision_time(size: str = "124m", device: str | None = None) -> str:
    """Seconds from a suspicion to the decision when trials are run: weights of a decoder in training are damaged, and
    the update after which surefoot acts takes that much longer than the others."""
    import torch

    from benchmarks.overhead import BATCH, OverheadCase, OverheadLoop
    from surefoot.models.decoder import next_token_loss
    from surefoot.trials.conclusion import TrialEvent

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    batch = BATCH[device].get(size, SMALL_BATCH) if device == "cuda" else TRIAL_BATCH.get(size, SMALL_BATCH)
    loop = OverheadLoop(OverheadCase(size, device=device, batch=batch))
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"run_dir": folder, "clip": 1.0, "step_fn": next_token_loss}
        tried: list[TrialEvent] = []
        with surefoot.attach(loop.model, loop.optimizers, **given) as guard:
            guard.on_event(lambda e: tried.append(e) if isinstance(e, TrialEvent) else None)
            for update in range(MAX_UPDATES):
                if tried:
                    break
                if update == DAMAGED_AT:
                    with torch.no_grad():
                        for p in loop.model.parameters():
                            p.mul_(DAMAGE if p.dim() > 1 else 1.0)
                start = time.perf_counter()
                loss, tokens = loop.loss()
                guard.watch(loss, tokens).backward()
                loop.finish()
                seconds.append(time.perf_counter() - start)
    where = f"training {batch[0]} x {batch[1]} tokens with step_fn, weights damaged before update {DAMAGED_AT}"
    if not tried:
        return f"{where}: no trial was run"
    branches = len(tried[0].values.get("branches", ()))
    usual, decision = statistics.median(seconds[DAMAGED_AT // 2 : DAMAGED_AT]), seconds[-1]
    return (
        f"{where}: {decision - usual:.2f} s from suspicion to decision ({tried[0].result.value}), with {branches} "
        f"branches tried; an update takes {1e3 * usual:.0f} ms"
    )

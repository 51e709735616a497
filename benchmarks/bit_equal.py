"""`surefoot bench equal`: trains bare and attached and compares every bit."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import surefoot
from surefoot.judge.policy import Policy
from surefoot.models.decoder import Decoder, DecoderConfig, next_token_loss

POLICIES = ("observe", "protect")
Watch = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """A model with a typical training loop for it."""

    name: str
    model: Callable[[], nn.Module]
    optimizers: Callable[[Any], list[Optimizer]]
    loss: Callable[[Any, Callable[..., Tensor]], tuple[Tensor, Tensor]]
    """The loss of a new batch, and the batch; the second argument draws normal numbers of a shape."""
    num_microbatches: int = 1
    """Micro-batches accumulated into one update."""
    clip: float = 0.0
    """The loop's own clipping by norm; 0 for none."""
    schedule: bool = False


@dataclass(kw_only=True)
class RunRecord:
    """All losses of a run, and its final state."""

    losses: list[Tensor] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 24, batch_first=True)
        self.lstm = nn.LSTM(24, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.gru(x)[0])[0][:, -1])


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 32, sparse=True)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        self.out = nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(tokens)).mean(1))


_DECODER = DecoderConfig(vocab=64, width=32, layers=2, heads=2, context=16, dropout=0.1)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def _conv() -> nn.Module:
    first = (nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU())
    second = (nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16, 1))


def _regression(*shape: int) -> Callable[[Any, Callable[..., Tensor]], tuple[Tensor, Tensor]]:
    def loss(model: nn.Module, normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        x = normal(*shape)
        return F.mse_loss(model(x)[:, 0], x.flatten(1).mean(1)), x

    return loss


def _tokens(normal: Callable[..., Tensor], count: int, *shape: int) -> Tensor:
    return (normal(*shape) * 1000).long().remainder(count)


def _decoder_loss(model: nn.Module, normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    tokens = _tokens(normal, _DECODER.vocab, 4, _DECODER.context + 1)
    return next_token_loss(model, tokens), tokens


def _encoder_loss(model: nn.Module, normal: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    tokens = _tokens(normal, 200, 8, 12)
    return F.cross_entropy(model(tokens), tokens[:, 0] % 4), tokens


def training_setups() -> tuple[TrainingSetup, ...]:
    """Five models whose loops cover most habits of training loops."""
    return (
        TrainingSetup(
            name="MLP, fused AdamW, accumulation",
            model=_mlp,
            optimizers=lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True)],
            loss=_regression(16, 16),
            num_microbatches=2,
        ),
        TrainingSetup(
            name="convolutions, batch norm, SGD, schedule",
            model=_conv,
            optimizers=lambda m: [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9, nesterov=True)],
            loss=_regression(8, 3, 8, 8),
            schedule=True,
        ),
        TrainingSetup(
            name="decoder, AdamW, own clipping",
            model=lambda: Decoder(_DECODER),
            optimizers=lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3)],
            loss=_decoder_loss,
            clip=1.0,
        ),
        TrainingSetup(
            name="GRU and LSTM, RMSprop",
            model=_Recurrent,
            optimizers=lambda m: [torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.5)],
            loss=_regression(8, 10, 8),
        ),
        TrainingSetup(
            name="sparse embedding, encoder, two optimizers",
            model=_Encoder,
            optimizers=lambda m: [
                torch.optim.SparseAdam(m.embed.parameters(), lr=1e-3),
                torch.optim.Adam([*m.encoder.parameters(), *m.out.parameters()], lr=1e-3),
            ],
            loss=_encoder_loss,
        ),
    )


def train(
    setup: TrainingSetup, steps: int, policy: str | Policy | None, *, device: str = "cpu", seed: int = 0
) -> RunRecord:
    """Train from a fixed start; `policy` None is the bare loop."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=data).to(device)

    model = setup.model().to(device)
    optimizers = setup.optimizers(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.05, total_steps=steps) if setup.schedule else None
    record = RunRecord()

    def loop(watch: Watch) -> None:
        for _ in range(steps):
            for _ in range(setup.num_microbatches):
                loss = watch(*setup.loss(model, normal))
                (loss / setup.num_microbatches).backward()
                record.losses.append(loss.detach())
            if setup.clip:
                nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
            for o in optimizers:
                o.step()
            if schedule is not None:
                schedule.step()
            for o in optimizers:
                o.zero_grad()

    if policy is None:
        loop(lambda loss, batch: loss)
    else:
        with (
            tempfile.TemporaryDirectory() as folder,
            surefoot.attach(model, optimizers, run_dir=folder, policy=policy) as guard,
        ):
            loop(guard.watch)
            guard.close()
            if guard.step != steps:
                raise AssertionError(f"{setup.name}: the guard counted {guard.step} of {steps} updates as applied")
    record.state = {
        "model": model.state_dict(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "optimizers": [o.state_dict() for o in optimizers],
        "schedule": schedule.state_dict() if schedule is not None else None,
        "random": _random_states(device),
        "data": data.get_state(),
    }
    return record


def _random_states(device: str) -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": pickle.dumps(np.random.get_state()),
        "python": random.getstate(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})


def differences(first: RunRecord, second: RunRecord) -> list[str]:
    """The parts in which two runs differ; empty when every bit is equal."""
    parts = [*_differences(first.state, second.state, "")]
    for i, (a, b) in enumerate(zip(first.losses, second.losses, strict=True)):
        if not torch.equal(a, b):
            parts.insert(0, f"losses, first at backward {i}")
            break
    return parts


def _differences(a: Any, b: Any, where: str) -> Iterator[str]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a, b):
            yield where
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            yield f"{where} (other keys)"
        for key in a.keys() & b.keys():
            yield from _differences(a[key], b[key], f"{where}.{key}" if where else str(key))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{where}.{i}")
    elif a is not b and a != b:
        yield where


@contextlib.contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """Use deterministic algorithms on CUDA; on a CPU the default ones are."""
    before = torch.are_deterministic_algorithms_enabled()
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def main(
    steps: int = 20_000,
    *,
    policies: Sequence[str] = POLICIES,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Compare all setups over `steps` updates in total; returns the exit code, 1 when any bit differs."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = training_setups()
    steps_per_setup = max(steps // len(chosen), 1)
    say(f"{steps_per_setup * len(chosen):,} updates on {device} with torch {torch.__version__}, bare and attached")
    say(f"{'family':<44}{'policy':<10}{'updates':>8}{'seconds':>9}   result")
    # On CUDA the bare loop is first compared with itself: without repeatability a comparison proves nothing.
    others: list[str | None] = [None, *policies] if device == "cuda" else [*policies]
    differing = 0
    with _deterministic(device):
        for setup in chosen:
            bare = train(setup, steps_per_setup, None, device=device)
            for policy in others:
                start = time.perf_counter()
                parts = differences(bare, train(setup, steps_per_setup, policy, device=device))
                differing += bool(parts)
                result = "equal" if not parts else f"DIFFERS: {', '.join(parts[:5])}"
                seconds = time.perf_counter() - start
                say(f"{setup.name:<44}{policy or 'bare':<10}{steps_per_setup:>8,}{seconds:>9.1f}   {result}")
    say("every bit is equal" if not differing else f"{differing} of {len(chosen) * len(others)} comparisons differ")
    return int(differing > 0)

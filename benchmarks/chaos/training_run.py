"""The training run that faults are tried on: a small net with every kind of state, which logs every loss."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # imported before the fork server forks
from torch import Tensor, nn

import surefoot
from surefoot.checkpoint import manager
from surefoot.checkpoint.standalone import Checkpoints
from surefoot.checkpoint.store import files, store
from surefoot.data import make_loader
from surefoot.guard.attached import AttachedGuard
from surefoot.guard.checkpointer import Checkpointer

T = TypeVar("T")
SAMPLES, WIDTH = 101, 12
"""A prime number of samples: the last batch of an epoch is always partial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What one training process does."""

    run: str
    steps: int = 60
    mode: str = "attach"
    """attach; waiting (attach, and the loop waits for each save); checkpoints (`Checkpoints` without a guard); sync
    (the same, saving synchronously); or bare: attached, without checkpoints."""
    save_every: int = 5
    save_seconds: float = 3600.0
    workers: int = 0
    precision: str = "float32"
    accumulate: int = 1
    strategy: str = "none"
    """none, ddp or fsdp."""
    batch: int = 8
    pause: float = 0.0
    """Seconds to sleep after each step, which leaves time for a kill."""
    signal_after: tuple[int, int] | None = None
    """(updates, signal): after that many updates the process sends itself the signal."""
    clock_years: int = 0
    """Years by which its clock is off."""
    disk_fault: str = ""
    """slow, full, read-only, i/o, hangs; or crash: SIGKILL before the next write."""
    fault_at: int = 0
    """Number of writes before the disk fault sets in."""

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, WIDTH)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ChaosRun:
    """A training loop as a user would write it."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        torch.manual_seed(1)
        net = SmallNet()
        self.model: Any = net
        if plan.strategy == "ddp":
            self.model = nn.parallel.DistributedDataParallel(net)
        elif plan.strategy == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(net)
        torch.manual_seed(2 + plan.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=17)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7, enabled=self.half)
        data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
        self.loader = make_loader(data, plan.batch, seed=5, num_workers=plan.workers)  # pyright: ignore
        self.losses = os.open(side_file(plan, "losses"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def half(self) -> bool:
        return self.plan.precision == "float16"

    def train(self, done: int, watch: Callable[[Tensor, Tensor], Tensor], after: Callable[[int], None]) -> None:
        if done >= self.plan.steps:
            return
        micro = 0
        while True:
            for x in self.loader:
                loss = watch(self._loss(x), x)
                self.scaler.scale(loss / self.plan.accumulate).backward()
                self._write(done, micro, loss)
                micro += 1
                if micro < self.plan.accumulate:
                    continue
                micro = 0
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.scheduler.step()
                done += 1
                after(done)
                if done >= self.plan.steps:
                    return

    def _loss(self, x: Tensor) -> Tensor:
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.plan.precision)
        autocast = torch.autocast("cpu", dtype=dtype) if dtype is not None else contextlib.nullcontext()
        with autocast:
            return (self.model(x) - x).float().pow(2).mean()

    def _write(self, done: int, micro: int, loss: Tensor) -> None:
        os.write(self.losses, f"{done}.{micro} {float(loss.detach()).hex()} {time.time_ns()}\n".encode())

    def state_hashes(self) -> dict[str, Any]:
        """A hash of each part of the final state."""
        weights = {name: _full_tensor(value) for name, value in self.model.state_dict().items()}
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        parts: dict[str, list[Any]] = {
            "weights": [weights[name] for name in sorted(weights)],
            "optimizer": [*map(_full_tensor, moments), [g["lr"] for g in self.optimizer.param_groups]],
            "scheduler": [self.scheduler.state_dict()["T_cur"], self.scheduler.state_dict()["last_epoch"]],
            "scaler": [self.scaler.state_dict()],
            "rng": [torch.get_rng_state()],
            "data": [self.loader.state_dict()],
        }
        return {name: _hash(values) for name, values in parts.items()}


def _full_tensor(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _hash(values: list[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        plain: Any = (
            value.detach().contiguous().view(torch.uint8).numpy()
            if isinstance(value, Tensor) and value.dim()
            else value
        )
        digest.update(plain.tobytes() if hasattr(plain, "tobytes") else repr(plain).encode())
    return digest.hexdigest()[:16]


def side_file(plan: RunPlan, name: str) -> Path:
    """A file beside the run directory for this rank's losses, first step or final hashes."""
    return Path(f"{plan.run}.{name}-{plan.rank}")


def main(plan: RunPlan) -> None:
    """Train as planned, resuming the run if it exists."""
    torch.set_num_threads(1)
    distributed = "WORLD_SIZE" in os.environ and os.environ["WORLD_SIZE"] != "1"
    if distributed:
        dist.init_process_group("gloo")
    _set_clock(plan.clock_years)
    _plant_disk_fault(plan)
    run = ChaosRun(plan)
    with _checkpointed(run) as (done, watch, after):
        side_file(plan, "begun").write_text(str(done))
        run.train(done, watch, after)
    side_file(plan, "end").write_text(json.dumps(run.state_hashes()))
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def _checkpointed(run: ChaosRun) -> Iterator[tuple[int, Callable[[Tensor, Tensor], Tensor], Callable[[int], None]]]:
    plan = run.plan

    def after_update(done: int) -> None:
        if plan.signal_after is not None and done == plan.signal_after[0]:
            os.kill(os.getpid(), plan.signal_after[1])
        if plan.pause:
            time.sleep(plan.pause)

    if plan.mode in ("checkpoints", "sync"):
        loop_state: dict[str, Any] = {"scheduler": run.scheduler, "loader": run.loader}
        every = plan.save_every if plan.mode == "checkpoints" else 1 << 60
        with Checkpoints(
            plan.run, run.model, run.optimizer, scaler=run.scaler, every=every, **loop_state
        ) as checkpoints:
            checkpoints.resume()

            def after(done: int) -> None:
                checkpoints.step()
                if plan.mode == "sync" and done % plan.save_every == 0:
                    checkpoints.save()
                after_update(done)

            yield checkpoints.count, lambda loss, x: loss, after
        return
    resume = plan.mode != "bare"
    options: dict[str, Any] = {"scaler": run.scaler} if run.half else {}
    policy = surefoot.Policy(save_every=plan.save_every, save_seconds=plan.save_seconds)
    with surefoot.attach(
        run.model,
        run.optimizer,
        run_dir=plan.run,
        scheduler=run.scheduler,
        loader=run.loader,
        resume=resume,
        policy=policy,
        **options,
    ) as guard:

        def wait(done: int) -> None:
            if plan.mode == "waiting":
                assert isinstance(guard, AttachedGuard)
                assert isinstance(guard._checkpointer, Checkpointer)
                guard._checkpointer._manager.poll(wait=True)
            after_update(done)

        yield guard.step, guard.watch, wait


# -- planted faults


def _set_clock(years: int) -> None:
    if years:
        real_time = time.time
        time.time = lambda: real_time() + years * 365.25 * 86400


def _plant_disk_fault(plan: RunPlan) -> None:
    if plan.disk_fault:
        failing = _FailingFiles(plan.disk_fault, plan.fault_at, struck=side_file(plan, "struck"))
        _patch(store, "Files", lambda: failing)
        _patch(manager, "STALL_TIMEOUT", 1.0)


def _patch(module: ModuleType, name: str, value: object) -> None:
    assert hasattr(module, name), f"{module.__name__} has no {name} to replace"
    setattr(module, name, value)


class _FailingFiles(files.Files):
    """A disk that fails in one way after `at` writes, or kills the process before the next one."""

    chunk = 4096

    def __init__(self, fault: str, at: int, struck: Path) -> None:
        self._fault, self._at, self._count = fault, at, 0
        self._struck_file = struck

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        if what in files.READS:
            return act()
        self._count += 1
        if self._count <= self._at:
            return act()
        if self._fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "slow":
            time.sleep(0.02)
            return act()
        if self._fault == "full" and what in ("rename", "unlink", "rmdir"):
            return act()  # a full disk still frees space

        self._struck_file.touch()
        if self._fault == "hangs":
            time.sleep(1e6)
        numbers = {"full": errno.ENOSPC, "read-only": errno.EROFS, "i/o": errno.EIO}
        raise OSError(numbers[self._fault], os.strerror(numbers[self._fault]), str(path))

"""The run that is killed: a small net with everything that has state, whose every loss is written down as it comes."""

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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # loaded before anything is forked
from torch import Tensor, nn

import surefoot
from surefoot.checkpoint import manager as keeping_room
from surefoot.checkpoint.standalone import Checkpoints
from surefoot.checkpoint.store import files as files_room
from surefoot.checkpoint.store import store as store_room
from surefoot.data import make_loader

T = TypeVar("T")
SAMPLES, WIDTH = 101, 12
"""A prime number of samples: the last batch of an epoch is always a partial one."""
CRASHED = 77


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one victim does."""

    run: str
    steps: int = 60
    way: str = "attach"
    """attach, waiting (attach, and the loop waits for each save), checkpoints, or bare: without saving anything."""
    every: int = 5
    seconds: float = 3600.0
    workers: int = 0
    precision: str = "float32"
    accumulate: int = 1
    spread: str = "none"
    """none, ddp or fsdp."""
    batch: int = 8
    pause: float = 0.0
    """Seconds slept after each step, so that there is time to be killed in."""
    stop: tuple[int, int] | None = None
    """After this many updates it sends itself this signal."""
    year: int = 0
    """By how many years its clock is wrong."""
    disk: str = ""
    """What is wrong with its disk: slow, full, read-only, i/o, hangs; or crash, before change number `at`."""
    at: int = 0
    """The number of the change from which on the disk is so."""

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, WIDTH)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Run:
    """A training run as a user would write it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        torch.manual_seed(1)
        net = Net()
        self.model: Any = net
        if plan.spread == "ddp":
            self.model = nn.parallel.DistributedDataParallel(net)
        elif plan.spread == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(net)
        torch.manual_seed(2 + plan.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=17)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7, enabled=self.half)
        data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
        self.loader = make_loader(data, plan.batch, seed=5, num_workers=plan.workers)  # pyright: ignore
        self.losses = os.open(beside(plan, "losses"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

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
        kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.plan.precision)
        auto = torch.autocast("cpu", dtype=kind) if kind is not None else contextlib.nullcontext()
        with auto:
            return (self.model(x) - x).float().pow(2).mean()

    def _write(self, done: int, micro: int, loss: Tensor) -> None:
        os.write(self.losses, f"{done}.{micro} {float(loss.detach()).hex()} {time.time_ns()}\n".encode())

    def end(self) -> dict[str, Any]:
        """Everything as it is at the end, as a hash of each part."""
        weights = {name: _whole(value) for name, value in self.model.state_dict().items()}
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        parts: dict[str, list[Any]] = {
            "weights": [weights[name] for name in sorted(weights)],
            "optimizer": [*map(_whole, moments), [g["lr"] for g in self.optimizer.param_groups]],
            "scheduler": [self.scheduler.state_dict()["T_cur"], self.scheduler.state_dict()["last_epoch"]],
            "scaler": [self.scaler.state_dict()],
            "chance": [torch.get_rng_state()],
            "data": [self.loader.state_dict()],
        }
        return {name: _hashed(values) for name, values in parts.items()}


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _hashed(values: list[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        plain: Any = (
            value.detach().contiguous().view(torch.uint8).numpy()
            if isinstance(value, Tensor) and value.dim()
            else value
        )
        found.update(plain.tobytes() if hasattr(plain, "tobytes") else repr(plain).encode())
    return found.hexdigest()[:16]


def beside(plan: Plan, name: str) -> Path:
    """A file in which a victim tells of itself, outside of its run."""
    return Path(f"{plan.run}.{name}-{plan.rank}")


def main(plan: Plan) -> None:
    """Train, as the plan says, from wherever the run was."""
    torch.set_num_threads(1)
    together = "WORLD_SIZE" in os.environ and os.environ["WORLD_SIZE"] != "1"
    if together:
        dist.init_process_group("gloo")
    _set_clock(plan.year)
    _spoil(plan)
    run = Run(plan)
    with _kept(run) as (done, watch, after):
        beside(plan, "begun").write_text(str(done))
        run.train(done, watch, after)
    beside(plan, "end").write_text(json.dumps(run.end()))
    if together:
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def _kept(run: Run) -> Iterator[tuple[int, Callable[[Tensor, Tensor], Tensor], Callable[[int], None]]]:
    plan = run.plan

    def passed(done: int) -> None:
        if plan.stop is not None and done == plan.stop[0]:
            os.kill(os.getpid(), plan.stop[1])
        if plan.pause:
            time.sleep(plan.pause)

    if plan.way in ("checkpoints", "sync"):
        own: dict[str, Any] = {"scheduler": run.scheduler, "loader": run.loader}
        every = plan.every if plan.way == "checkpoints" else 1 << 60
        with Checkpoints(plan.run, run.model, run.optimizer, scaler=run.scaler, every=every, **own) as kept:
            kept.resume()

            def after(done: int) -> None:
                kept.step()
                if plan.way == "sync" and done % plan.every == 0:
                    kept.save()
                passed(done)

            yield kept.count, lambda loss, x: loss, after
        return
    resume = plan.way != "bare"
    options: dict[str, Any] = {"scaler": run.scaler} if run.half else {}
    policy = surefoot.Policy(save_every=plan.every, save_seconds=plan.seconds)
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
            anchor = getattr(guard, "_anchor", None)
            if plan.way == "waiting" and anchor is not None:
                anchor._keeping.poll(wait=True)
            passed(done)

        yield guard.step, guard.watch, wait


# -- what is wrong with its world


def _set_clock(years: int) -> None:
    if years:
        right = time.time
        time.time = lambda: right() + years * 365.25 * 86400


def _spoil(plan: Plan) -> None:
    if plan.disk:
        spoilt = _Spoilt(plan.disk, plan.at, struck=beside(plan, "struck"))
        setattr(store_room, "Files", lambda: spoilt)
        setattr(keeping_room, "STALL_TIMEOUT", 1.0)


class _Spoilt(files_room.Files):
    """A disk that fails in one way from change number `at` on, or crashes the process before it."""

    chunk = 4096

    def __init__(self, how: str, at: int, struck: Path) -> None:
        self._how, self._at, self._count = how, at, 0
        self._struck = struck

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        if what in files_room.READS:
            return act()
        self._count += 1
        if self._count <= self._at:
            return act()
        if self._how == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "slow":
            time.sleep(0.02)
            return act()
        if self._how == "full" and what in ("rename", "unlink", "rmdir"):
            return act()  # a full disk lets go of what is there
        self._struck.touch()
        if self._how == "hangs":
            time.sleep(1e6)
        numbers = {"full": errno.ENOSPC, "read-only": errno.EROFS, "i/o": errno.EIO}
        raise OSError(numbers[self._how], os.strerror(numbers[self._how]), str(path))

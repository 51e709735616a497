"""Training loops that are killed and resumed, one kind after the other, in forked processes.

Run as a program, it reads names of loops from stdin, one per line, and prints one line of JSON for each:
the steps whose losses differ from an uninterrupted run, the warnings about that, and how each process ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # loaded before anything is forked
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import surefoot
import surefoot.guard.checkpointer
from surefoot.data import make_loader
from surefoot.guard import preemption

STEPS = 30
WIDTH = 6
LIMIT = 100
"""Seconds after which a hanging process is killed."""


@dataclass(frozen=True)
class Kill:
    """A signal that a process sends itself at one point of one iteration."""

    step: int
    place: str
    how: str
    """KILL, STOP (then killed), TERM, TWICE (TERM, and TERM again during the exit), INT or HUP."""


KILLS = (
    Kill(8, "stepped", "KILL"),
    Kill(10, "fetched", "TWICE"),
    Kill(17, "stepped", "STOP"),
    Kill(19, "backward", "INT"),
    Kill(25, "fetched", "HUP"),
)
ENDS = {"KILL": -9, "STOP": -9, "TERM": 143, "TWICE": 143, "INT": 130, "HUP": 129, "": 0}
"""Exit code after each."""


class Job:
    """One process of a run: it records its losses and kills itself at the planned point."""

    def __init__(self, run: Path, kill: Kill | None, *, resume: bool, rank: int = 0) -> None:
        self.run, self.kill, self.resume, self.rank = run, kill, resume, rank
        self._losses = os.open(f"{run}.losses-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def attach(self, model: nn.Module, optimizer: Any, **options: Any) -> surefoot.Guard:
        policy = surefoot.Policy(save_every=2)
        run = f"{self.run}" if self.resume else f"{self.run}.bare"
        guard = surefoot.attach(model, optimizer, run_dir=run, policy=policy, resume=self.resume, **options)
        self._manager: Any = getattr(getattr(guard, "_checkpointer", None), "_manager", None)
        return guard

    def loss(self, step: int, loss: Tensor) -> None:
        os.write(self._losses, f"{step} {float(loss.detach()).hex()}\n".encode())
        if self._manager is not None:  # these steps are shorter than a save
            self._manager.poll(wait=True)
        if dist.is_initialized():  # ranks need time to agree on the step at which they end
            time.sleep(0.1)

    def at(self, step: int, place: str) -> None:
        kill = self.kill
        if kill is None or self.rank or (kill.step, kill.place) != (step, place):
            return
        number = {"TWICE": "TERM"}.get(kill.how, kill.how)
        os.kill(os.getpid(), getattr(signal, f"SIG{number}"))
        if kill.how == "TWICE":
            os.kill(os.getpid(), signal.SIGTERM)
            atexit.register(os.kill, os.getpid(), signal.SIGTERM)


# -- data and models


class Samples(Dataset[Tensor]):
    """Fixed samples; `noise` adds numbers from the three global generators as a sample is read."""

    def __init__(self, *, noise: bool = False) -> None:
        self.data, self.noise = torch.randn(44, WIDTH, generator=torch.Generator().manual_seed(3)), noise

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index] + (draw(WIDTH) if self.noise else 0.0)


def draw(*shape: int) -> Tensor:
    """Numbers from torch's, NumPy's and Python's global generators."""
    return 0.1 * torch.randn(shape) + 0.1 * float(np.random.rand()) + 0.1 * random.random()


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, WIDTH))


def stateful(**options: Any) -> Any:
    with contextlib.suppress(Exception):
        return StatefulDataLoader(Samples(**options), 4)


def endless(batches: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from batches()


# -- loops


def simple(
    job: Job,
    loader: Any,
    *,
    named: bool,
    before: Callable[[], Tensor | float] = lambda: 0.0,
    after: Callable[[], Tensor | float] = lambda: 0.0,
    evaluate: bool = False,
    accumulate: int = 1,
    extra: dict[str, Any] | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> None:
    """`before` is drawn between a step and the next fetch; `after` is drawn after the fetch."""
    model = wrap(small_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)
    options = {"extra": extra} if extra else {}
    with job.attach(model, optimizer, scheduler=scheduler, loader=loader, **options) as guard:
        step, micro, kept = guard.step, 0, 0.0
        if step >= STEPS:
            return
        for x in endless(lambda: guard.batches(loader) if named else iter(loader)):
            job.at(step, "fetched")
            x = x + after()
            loss = guard.watch((model(x) - x).pow(2).mean(), x)
            (loss / accumulate).backward()
            job.loss(step * accumulate + micro, loss)
            job.at(step, "backward")
            micro += 1
            if micro < accumulate:
                continue
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step, micro = step + 1, 0
            if evaluate and step % 2 == 0:
                model.eval()
                with torch.no_grad():
                    for y in stateful():
                        model(y + draw(1))
                model.train()
            kept += float(torch.as_tensor(before()).sum())
            job.at(step, "stepped")
            if step >= STEPS:
                return


def own_numbers_after_the_fetch(job: Job) -> None:
    simple(job, make_loader(Samples(), 4, seed=1), named=True, after=lambda: draw(WIDTH))


def own_numbers_before_the_fetch(job: Job) -> None:
    simple(job, make_loader(Samples(), 4, seed=1), named=True, before=lambda: draw(2), after=lambda: draw(1))


def own_numbers_with_our_loader_alone(job: Job) -> None:
    simple(job, make_loader(Samples(), 4, seed=1), named=False, before=lambda: draw(2), after=lambda: draw(1))


def own_numbers_after_the_fetch_unnamed(job: Job) -> None:
    simple(job, StatefulDataLoader(Samples(), 4, generator=torch.Generator()), named=False, after=lambda: draw(WIDTH))


def own_numbers_before_the_fetch_unnamed(job: Job) -> None:
    simple(job, StatefulDataLoader(Samples(), 4, generator=torch.Generator()), named=False, before=lambda: draw(2))


def dataset_with_global_generators(job: Job) -> None:
    simple(job, make_loader(Samples(noise=True), 4, seed=1), named=False)


def dataset_with_global_generators_of_torchdata(job: Job) -> None:
    simple(job, StatefulDataLoader(Samples(noise=True), 4), named=True)


def dataset_with_global_generators_unnamed(job: Job) -> None:
    simple(job, StatefulDataLoader(Samples(noise=True), 4, generator=torch.Generator()), named=False)


def workers(job: Job) -> None:
    simple(job, make_loader(Samples(noise=True), 4, seed=1, num_workers=2), named=True, after=lambda: draw(1))


def workers_of_torchdata(job: Job) -> None:
    loader = StatefulDataLoader(Samples(noise=True), 4, num_workers=1, generator=torch.Generator())
    simple(job, loader, named=True)


def generator_in_extra(job: Job, *, named: bool = True) -> None:
    generator = torch.Generator().manual_seed(9)
    theirs = StatefulDataLoader(Samples(), 4, generator=torch.Generator())
    loader = make_loader(Samples(), 4, seed=1) if named else theirs
    extra: dict[str, Any] = {"gen": generator, "numpy": np.random.RandomState(4)}
    simple(job, loader, named=named, extra=extra, after=lambda: torch.randn(1, generator=generator))


def generator_in_extra_unnamed(job: Job) -> None:
    generator_in_extra(job, named=False)


def accumulation(job: Job) -> None:
    simple(job, make_loader(Samples(noise=True), 4, seed=1), named=True, accumulate=3, after=lambda: draw(1))


def evaluation(job: Job) -> None:
    simple(job, make_loader(Samples(), 4, seed=1), named=True, evaluate=True, after=lambda: draw(1))


def averaged_weights(job: Job) -> None:
    model = small_net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
    loader = make_loader(Samples(), 4, seed=1)
    with job.attach(model, optimizer, scheduler=scheduler, loader=loader, extra={"ema": average}) as guard:
        step = guard.step
        for x in endless(lambda: guard.batches(loader)) if step < STEPS else ():
            job.at(step, "fetched")
            with torch.no_grad():
                target = average(x)
            loss = guard.watch((model(x + draw(1)) - x).pow(2).mean() + (model(x) - target).pow(2).mean(), x)
            loss.backward()
            job.loss(step, loss)
            job.at(step, "backward")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            step += 1
            job.at(step, "stepped")
            if step >= STEPS:
                break


def closure(job: Job) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    loader = make_loader(Samples(noise=True), 11, seed=1)
    with job.attach(model, optimizer, loader=loader) as guard:
        step = guard.step
        for x in endless(lambda: guard.batches(loader)) if step < STEPS else ():
            job.at(step, "fetched")
            target = x + draw(1)

            def evaluate(x: Tensor = x, target: Tensor = target) -> Tensor:
                optimizer.zero_grad()
                loss = guard.watch((model(x) - target).pow(2).mean(), x)
                loss.backward()
                return loss

            loss = optimizer.step(evaluate)
            job.loss(step, loss)
            job.at(step, "backward")
            step += 1
            job.at(step, "stepped")
            if step >= STEPS:
                break


def no_loader(job: Job, *, named: bool = True) -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with job.attach(model, optimizer) as guard:
        for step in guard.batches() if named else range(guard.step, STEPS):
            if step >= STEPS:
                break
            x = torch.randn(5, WIDTH) + draw(1)
            job.at(step, "fetched")
            loss = guard.watch((model(x) - x).pow(2).mean(), x)
            loss.backward()
            job.loss(step, loss)
            job.at(step, "backward")
            optimizer.step()
            optimizer.zero_grad()
            if named and step % 2:
                draw(3)
            job.at(step + 1, "stepped")


def no_loader_unnamed(job: Job) -> None:
    no_loader(job, named=False)


def batch_drawn_ahead_unnamed(job: Job) -> None:
    """As in nanoGPT: the next batch is drawn while the device still computes this one."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with job.attach(model, optimizer) as guard:
        x = torch.randn(5, WIDTH)
        for step in range(guard.step, STEPS):
            job.at(step, "fetched")
            loss = guard.watch((model(x) - x).pow(2).mean(), x)
            x = torch.randn(5, WIDTH)
            loss.backward()
            job.loss(step, loss)
            job.at(step, "backward")
            optimizer.step()
            optimizer.zero_grad()
            job.at(step + 1, "stepped")


def alternating(job: Job, *, critic_steps: int = 1) -> None:
    model = nn.ModuleDict(
        {"generator": nn.Linear(3, WIDTH), "critic": nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 1))}
    )
    generator, critic = model["generator"], model["critic"]
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=0.01)
    generator_optimizer = torch.optim.AdamW(generator.parameters(), lr=0.01)
    loader = make_loader(Samples(), 4, seed=1)
    with job.attach(model, [critic_optimizer, generator_optimizer], loader=loader) as guard:
        batches = endless(lambda: guard.batches(loader))
        for step in range(guard.step, STEPS):
            for _ in range(critic_steps):
                real = next(batches)
                job.at(step, "fetched")
                fake = generator(torch.randn(4, 3)).detach()
                loss = guard.watch(critic(fake).sigmoid().mean() - critic(real + draw(1)).sigmoid().mean(), real)
                critic_optimizer.zero_grad()
                loss.backward()
                critic_optimizer.step()
            job.at(step, "backward")
            made = guard.watch(-critic(generator(torch.randn(4, 3))).sigmoid().mean())
            generator_optimizer.zero_grad()
            made.backward()
            generator_optimizer.step()
            job.loss(step, loss + 1000 * made)
            job.at(step + 1, "stepped")


def alternating_five_to_one(job: Job) -> None:
    alternating(job, critic_steps=5)


def two_processes(job: Job) -> None:
    loader = make_loader(Samples(noise=True), 4, seed=1, rank=job.rank, world_size=2)
    simple(job, loader, named=True, after=lambda: draw(1), wrap=nn.parallel.DistributedDataParallel)


LOOPS: dict[str, Callable[[Job], None]] = {
    loop.__name__: loop
    for loop in (
        own_numbers_after_the_fetch,
        own_numbers_before_the_fetch,
        own_numbers_with_our_loader_alone,
        own_numbers_after_the_fetch_unnamed,
        own_numbers_before_the_fetch_unnamed,
        dataset_with_global_generators,
        dataset_with_global_generators_of_torchdata,
        dataset_with_global_generators_unnamed,
        workers,
        workers_of_torchdata,
        generator_in_extra,
        generator_in_extra_unnamed,
        accumulation,
        evaluation,
        averaged_weights,
        closure,
        no_loader,
        no_loader_unnamed,
        batch_drawn_ahead_unnamed,
        alternating,
        alternating_five_to_one,
        two_processes,
    )
}


# -- processes


def train_in_fork(name: str, make: Callable[[], Job], rank: int, port: int) -> NoReturn:
    """Train in a forked process and exit as the interpreter would, but without tearing down loaded modules."""
    signal.alarm(LIMIT)
    code: Any = 0
    try:
        job = make()
        log = os.open(f"{job.run}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if port:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
            dist.init_process_group("gloo")
            preemption.LEAD_SECONDS, preemption._POLL_SECONDS = 0.4, 0.05  # these runs are short
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(1 + rank)
        LOOPS[name](job)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        os._exit(code if isinstance(code, int) else 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(name: str, folder: Path, kill: Kill | None, *, resume: bool = True) -> list[int]:
    """Run all processes of a run and return their exit codes."""
    ranks = range(2 if name == "two_processes" else 1)
    port = free_port() if len(ranks) > 1 else 0
    pids = []
    for rank in ranks:
        pid = os.fork()
        if pid == 0:
            train_in_fork(name, lambda rank=rank: Job(folder, kill, resume=resume, rank=rank), rank, port)
        pids.append(pid)
    codes = []
    for pid in pids:
        status = os.waitpid(pid, os.WUNTRACED)[1]
        if os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        if (
            codes == [] and kill is not None and kill.how in ("KILL", "STOP")
        ):  # the others would wait for the killed rank
            for other in pids[1:]:
                os.kill(other, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(status))
    return codes


def losses(folder: Path, rank: int) -> tuple[dict[int, str], list[int]]:
    """The last loss of each step, and the steps whose loss differed when repeated."""
    seen: dict[int, str] = {}
    changed = []
    for line in Path(f"{folder}.losses-{rank}").read_text().splitlines():
        step, loss = line.split()
        if seen.setdefault(int(step), loss) != loss:
            changed.append(int(step))
    return seen, changed


def try_loop(name: str, folder: Path) -> dict[str, Any]:
    """Kill one run five times and compare it with an uninterrupted one."""
    straight, killed = folder / f"{name}-straight", folder / f"{name}-killed"
    assert set(run(name, straight, None, resume=False)) == {0}, Path(f"{straight}.log").read_text()[-2000:]
    codes = [run(name, killed, kill)[0] for kill in (*KILLS, None)]
    differ: set[int] = set()
    for rank in range(2 if name == "two_processes" else 1):
        expected, _ = losses(straight, rank)
        seen, changed = losses(killed, rank)
        differ |= {step for step in expected if seen.get(step) != expected[step]} | set(changed)
        differ |= seen.keys() - expected
    events = surefoot.read(killed).events
    warnings = [e["detail"] for e in events if e["kind"] == "checkpoint" and e.get("name") == "inexact"]
    at_attach = [e["detail"] for e in events if e.get("name") == "exact_if" and e["step"] == 0]
    starts = [e["values"]["step"] for e in events if e["kind"] == "checkpoint" and e.get("name") == "resumed"]
    log = Path(f"{killed}.log").read_text() if Path(f"{killed}.log").exists() else ""
    return {
        "differ": sorted(differ),
        "warnings": warnings,
        "at_attach": at_attach,
        "codes": codes,
        "resumed": starts,
        "log": log[-3000:],
    }


def main() -> None:
    torch.set_num_threads(1)
    for module in ("surefoot.guard.attach", "torch._dynamo", "torch.distributed.fsdp", "torch.onnx", "numpy.fft"):
        importlib.import_module(module)  # so that no fork has to load them
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(try_loop(line.strip(), Path(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()

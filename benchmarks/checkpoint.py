"""`surefoot bench checkpoint`: what a save costs the training beside it, against the usual ways to save."""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.overhead import machine
from surefoot.checkpoint.format.load import load_checkpoint
from surefoot.checkpoint.saver import AsyncSaver
from surefoot.checkpoint.snapshot_memory import Location, format_bytes
from surefoot.checkpoint.store import CheckpointStore
from surefoot.checkpoint.train_state import TrainState
from surefoot.models.decoder import SIZES, Decoder, count_parameters

SPAN = {"cuda": 20, "cpu": 8}
"""Updates that are timed one by one."""
BEFORE = 4
"""The one of them before which the save begins: the device has work in its queue by then, as it has in a run."""
LASTS = 8
"""The ones from there on that are looked at for a stall: a copy is taken in the first, and on its way to the host in a
few more. With each that is added the measure errs by more; what goes on beside later ones is told as such."""
TIMES = 5
"""Saves of each kind, one after the other; torch.save and DCP get by with two."""
_LARGE = 5e9
"""Bytes from which on only surefoot's usual way is measured: the others take minutes."""
BESIDE = 60.0
"""Seconds at most that training is watched while a save is written."""
SHAPE = {"10m": (64, 128), "124m": (16, 1024), "1.3b": (8, 1024)}
"""Batch and length on a device: enough work for its queue never to be empty, as in a run that uses the device well."""
SHORT = (1, 64)
"""The same where the host is the limit: the device waits for it, and so does training for whatever keeps it busy."""


@dataclass(slots=True)
class Work:
    """A decoder that trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: str
    batch: torch.Tensor

    def step(self, settle: Callable[[], object] | None = None) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(self.batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten())
        loss.backward()
        if settle is not None:
            settle()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def launch(self) -> float:
        """Seconds that the host takes to launch one update, with nothing to wait for."""
        self.wait()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def span(self, way: Way | None = None) -> Span:
        """Some updates, and a save that begins amid them."""
        self.wait()
        call, clock = 0.0, Clock(self.device)
        for k in range(SPAN[self.device]):
            if way is not None and k == BEFORE:
                begun = time.perf_counter()
                way.begin()
                call = time.perf_counter() - begun
            self.step(way.settle if way is not None and k == BEFORE else None)
            clock.mark()
        return Span(clock.seconds(), call)


class Clock:
    """Moments one after the other; on a device those at which its queue comes to them, so that nothing waits."""

    def __init__(self, device: str) -> None:
        self._on_device = device == "cuda"
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        if self._on_device:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each to the next."""
        if self._on_device:
            self._events[-1].synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events)]
        return [after - before for before, after in itertools.pairwise(self._moments)]


@dataclass(frozen=True, slots=True)
class Span:
    """Updates one after the other."""

    seconds: list[float]
    call: float
    """Seconds that the call of a save took."""

    @property
    def usual(self) -> float:
        """Seconds of an update; the first begins with an empty queue."""
        return statistics.median(self.seconds[1:])

    @property
    def stall(self) -> float:
        """Seconds by which a few updates from a save on took longer than the usual one of them all.

        What makes all of them slower alike is no stall; it is told as such.
        """
        after = self.seconds[BEFORE : BEFORE + LASTS]
        return sum(after) - len(after) * self.usual


@dataclass(slots=True)
class Way:
    """How to save: begin; what the next update waits for; whether it is over; wait for its end."""

    begin: Callable[[], object]
    settle: Callable[[], object]
    over: Callable[[], bool]
    end: Callable[[], object]


def main(size: str, device: str | None, folder: Path | None, say: Callable[[str], None]) -> str:
    """The table, in words."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    work = _work(size, device)
    for _ in range(3):
        work.span()
    whole = TrainState(work.model, work.optimizer)
    nbytes = sum(whole.collect().nbytes.values())
    told = (
        f"{count_parameters(work.model) / 1e6:.0f} M parameters with AdamW, {format_bytes(nbytes)}; {machine(device)}"
    )
    restored = ""
    lines = [
        f"{told}; updates of {_pace(work)}",
        "| save | stall of the first, ms | of others | at worst | the call, ms | training beside it, x | written, s |",
        "|---|---|---|---|---|---|---|",
    ]
    root = Path(tempfile.mkdtemp(dir=folder))
    try:
        for name, make in _ways(work, whole, root).items():
            lines.append(_line(name, work, make))
            say(lines[-1])
            if name == USUAL:
                restored = _restore(work, whole, root)
            _emptied(root)
        if device == "cuda":
            short = replace(work, batch=_batch(size, *SHORT, device))
            short.span()
            lines[0] += f", or where the host is the limit {_pace(short)}"
            for name, make in itertools.islice(_ways(short, whole, root).items(), 2):
                lines.append(_line(f"{name}; the host is the limit", short, make))
                say(lines[-1])
                _emptied(root)
        lines.append(restored)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return "\n".join(lines)


def _emptied(folder: Path) -> None:
    """Several copies of a large model would fill the disk."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _pace(work: Work) -> str:
    launch = statistics.median(work.launch() for _ in range(5))
    return f"{1e3 * _plain(work):.1f} ms, launched in {1e3 * launch:.1f} ms"


def _plain(work: Work) -> float:
    """Seconds of an update without a save."""
    return statistics.median(work.span().usual for _ in range(3))


def _work(size: str, device: str) -> Work:
    torch.manual_seed(0)
    config = SIZES[size]
    model = Decoder(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    rows, length = SHAPE[size] if device == "cuda" else (1, 32)
    return Work(model, optimizer, device, _batch(size, rows, length, device))


def _batch(size: str, rows: int, length: int, device: str) -> torch.Tensor:
    config = SIZES[size]
    return torch.randint(0, config.vocab, (rows, min(length, config.context - 1) + 1), device=device)


USUAL = "surefoot, beside the model"
"""What is measured first, so that its first save is the first of the process."""


def _ways(work: Work, whole: TrainState, root: Path) -> dict[str, Callable[[], list[Way]]]:
    found: dict[str, Callable[[], list[Way]]] = {
        "none: what the measure itself errs by": lambda: [Way(_nothing, _nothing, lambda: True, _nothing)] * TIMES,
        USUAL: lambda: _surefoot(whole, root / "device", "device"),
    }
    small = sum(whole.collect().nbytes.values()) < _LARGE
    if small and work.device == "cuda":
        found["surefoot, no room beside the model"] = lambda: _surefoot(whole, root / "host", "host")
    if small:
        found["torch.save"] = lambda: [_torch(work, root)] * 2
    if small and dist.is_available():
        found["DCP async_save"] = lambda: [_dcp(work, root / f"dcp{k}") for k in range(2)]
    return found


def _surefoot(whole: TrainState, folder: Path, home: Location) -> list[Way]:
    saving = AsyncSaver(whole, CheckpointStore(folder), location=home)
    saving.preallocate()
    while saving.busy:
        time.sleep(0.05)

    def begin() -> None:
        number = next(numbers)
        saving.write(saving.capture(number), number, {})

    def over() -> bool:
        return saving._save_task is None or saving._save_task.over

    def end() -> None:
        outcome = saving.result(wait=True)
        if outcome is None or outcome.error:
            raise RuntimeError(f"not saved: {outcome.error if outcome else 'nothing was under way'}")

    numbers = itertools.count(1)
    return [Way(begin, saving.before_update, over, end)] * TIMES


def _torch(work: Work, root: Path) -> Way:
    return Way(lambda: torch.save(_state(work), root / "plain.pt"), _nothing, lambda: True, _nothing)


def _dcp(work: Work, folder: Path) -> Way:
    held: list[Any] = []

    def begin() -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held.append(dcp.async_save(_state(work), checkpoint_id=str(folder)))

    def over() -> bool:
        return held[0].done()

    return Way(begin, _nothing, over, lambda: held.pop().result())


def _state(work: Work) -> dict[str, Any]:
    return {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}


def _nothing() -> None:
    pass


def _line(name: str, work: Work, make: Callable[[], list[Way]]) -> str:
    stalls, calls, beside, after = [], [], [], []
    plain = 0.0
    for way in make():
        plain = plain or _plain(work)  # what there is to make for it is made by now
        span = work.span(way)
        began = time.perf_counter()
        while not way.over() and time.perf_counter() - began < BESIDE:
            beside.append(work.span().usual / plain)
        way.end()
        after.append(time.perf_counter() - began)
        stalls.append(1e3 * span.stall)
        calls.append(1e3 * span.call)
    training = f"{statistics.median(beside):.3f}" if beside else "-"
    return (
        f"| {name} | {stalls[0]:.1f} | {statistics.median(stalls[1:]):.1f} | {max(stalls[1:]):.1f} |"
        f" {statistics.median(calls):.1f} | {training} | {statistics.median(after):.1f} |"
    )


def _restore(work: Work, whole: TrainState, root: Path) -> str:
    """A restore against reading the same files once, both from a warm cache."""
    kept = CheckpointStore(root / "device").newest()
    if kept is None:
        return "nothing was saved to restore"
    files = [path for path in kept.folder.iterdir() if path.is_file()]

    def read() -> float:
        start = time.perf_counter()
        for path in files:
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
        return time.perf_counter() - start

    def restore() -> float:
        start = time.perf_counter()
        load_checkpoint(kept.folder, whole, AsyncSaver(whole, CheckpointStore(root)).names())
        work.wait()
        return time.perf_counter() - start

    read()
    reads, restores = [read() for _ in range(3)], [restore() for _ in range(3)]
    ratio = statistics.median(restores) / statistics.median(reads)
    return f"restore: {statistics.median(restores):.2f} s, {ratio:.2f}x reading the files once"

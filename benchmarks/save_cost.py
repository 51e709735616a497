"""`surefoot bench checkpoint`: how long a save stalls training, against torch.save and DCP."""

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

from benchmarks.overhead import describe_machine
from surefoot.checkpoint.format.load_checkpoint import load_checkpoint
from surefoot.checkpoint.saver import AsyncSaver
from surefoot.checkpoint.snapshot_memory import Location, format_bytes
from surefoot.checkpoint.store import CheckpointStore
from surefoot.checkpoint.train_state import TrainState
from surefoot.models.decoder import SIZES, Decoder, count_parameters

TIMED_STEPS = {"cuda": 20, "cpu": 8}
"""Updates timed one by one."""
SAVE_BEFORE_STEP = 4
"""Index of the update before which the save begins: by then the device has work queued, as in a real run."""
STALL_STEPS = 8
"""Updates from there on that count towards the stall: a copy is taken in the first and moves to the host in a few more.
Each further update adds measurement error; slower updates after these are reported as "training beside it"."""
SAVES_PER_METHOD = 5
"""Consecutive saves per method; two for torch.save and DCP."""
_LARGE_STATE_BYTES = 5e9
"""State size from which only surefoot's default method is measured: the others take minutes."""
MAX_WRITE_SECONDS = 60.0
"""Longest time that training is timed while a save is written."""
DEVICE_BOUND_SHAPE = {"10m": (64, 128), "124m": (16, 1024), "1.3b": (8, 1024)}
"""Batch size and length that keep the device's queue full, as in a run with high utilisation."""
HOST_BOUND_SHAPE = (1, 64)
"""Batch size and length of a host-bound loop: whatever keeps the host busy delays training."""


@dataclass(slots=True)
class StepLoop:
    """A decoder in training."""

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

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def launch_seconds(self) -> float:
        """Host seconds to launch one update."""
        self.synchronize()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def timed_steps(self, method: SaveMethod | None = None) -> StepTimes:
        """Time some updates, with a save that begins in the midst of them."""
        self.synchronize()
        call, clock = 0.0, StepClock(self.device)
        for k in range(TIMED_STEPS[self.device]):
            if method is not None and k == SAVE_BEFORE_STEP:
                start = time.perf_counter()
                method.begin()
                call = time.perf_counter() - start
            self.step(method.settle if method is not None and k == SAVE_BEFORE_STEP else None)
            clock.mark()
        return StepTimes(clock.seconds(), call)


class StepClock:
    """Timestamps between updates; on CUDA they are events in the stream, so that nothing waits."""

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
        """Seconds between consecutive marks."""
        if self._on_device:
            self._events[-1].synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events)]
        return [after - before for before, after in itertools.pairwise(self._moments)]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of consecutive updates."""

    seconds: list[float]
    call_seconds: float
    """Seconds that the call to save took."""

    @property
    def median_step(self) -> float:
        """Median seconds per update without the first, which starts with an empty queue."""
        return statistics.median(self.seconds[1:])

    @property
    def stall(self) -> float:
        """Extra seconds, over the median, of the first few updates after a save began.

        A slowdown of all updates alike is not a stall; it is reported as "training beside it".
        """
        after = self.seconds[SAVE_BEFORE_STEP : SAVE_BEFORE_STEP + STALL_STEPS]
        return sum(after) - len(after) * self.median_step


@dataclass(slots=True)
class SaveMethod:
    """A way to save: start it; wait before the next optimizer step; has it finished; wait for its end."""

    begin: Callable[[], object]
    settle: Callable[[], object]
    over: Callable[[], bool]
    end: Callable[[], object]


def main(size: str, device: str | None, folder: Path | None, say: Callable[[str], None]) -> str:
    """The table as Markdown."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loop = _build_loop(size, device)
    for _ in range(3):
        loop.timed_steps()
    state = TrainState(loop.model, loop.optimizer)
    nbytes = sum(state.collect().nbytes.values())
    parameters = count_parameters(loop.model) / 1e6
    setup = f"{parameters:.0f} M parameters with AdamW, {format_bytes(nbytes)}; {describe_machine(device)}"
    restored = ""
    lines = [
        f"{setup}; updates of {_step_description(loop)}",
        "| save | first stall, ms | median stall | max stall | call, ms | training beside it, x | written, s |",
        "|---|---|---|---|---|---|---|",
    ]
    root = Path(tempfile.mkdtemp(dir=folder))
    try:
        for name, make in _save_methods(loop, state, root).items():
            lines.append(_line(name, loop, make))
            say(lines[-1])
            if name == SUREFOOT_DEVICE:
                restored = _restore(loop, state, root)
            _clear_folder(root)
        if device == "cuda":
            short = replace(loop, batch=_batch(size, *HOST_BOUND_SHAPE, device))
            short.timed_steps()
            lines[0] += f", or host-bound {_step_description(short)}"
            for name, make in itertools.islice(_save_methods(short, state, root).items(), 2):
                lines.append(_line(f"{name}; host-bound", short, make))
                say(lines[-1])
                _clear_folder(root)
        lines.append(restored)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return "\n".join(lines)


def _clear_folder(folder: Path) -> None:
    """Delete everything in a folder: several copies of a large model would fill the disk."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _step_description(loop: StepLoop) -> str:
    launch = statistics.median(loop.launch_seconds() for _ in range(5))
    return f"{1e3 * _median_step_without_save(loop):.1f} ms, launched in {1e3 * launch:.1f} ms"


def _median_step_without_save(loop: StepLoop) -> float:
    """Median seconds per update without a save."""
    return statistics.median(loop.timed_steps().median_step for _ in range(3))


def _build_loop(size: str, device: str) -> StepLoop:
    torch.manual_seed(0)
    config = SIZES[size]
    model = Decoder(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    rows, length = DEVICE_BOUND_SHAPE[size] if device == "cuda" else (1, 32)
    return StepLoop(model, optimizer, device, _batch(size, rows, length, device))


def _batch(size: str, rows: int, length: int, device: str) -> torch.Tensor:
    config = SIZES[size]
    return torch.randint(0, config.vocab, (rows, min(length, config.context - 1) + 1), device=device)


SUREFOOT_DEVICE = "surefoot, copy on the device"
"""Measured first, so that its first save is the first of the process."""


def _save_methods(loop: StepLoop, state: TrainState, root: Path) -> dict[str, Callable[[], list[SaveMethod]]]:
    methods: dict[str, Callable[[], list[SaveMethod]]] = {
        "none (measurement error)": lambda: [SaveMethod(_no_op, _no_op, lambda: True, _no_op)] * SAVES_PER_METHOD,
        SUREFOOT_DEVICE: lambda: _surefoot_saves(state, root / "device", "device"),
    }
    small = sum(state.collect().nbytes.values()) < _LARGE_STATE_BYTES
    if small and loop.device == "cuda":
        methods["surefoot, copy on the host"] = lambda: _surefoot_saves(state, root / "host", "host")
    if small:
        methods["torch.save"] = lambda: [_torch_save(loop, root)] * 2
    if small and dist.is_available():
        methods["DCP async_save"] = lambda: [_dcp_save(loop, root / f"dcp{k}") for k in range(2)]
    return methods


def _surefoot_saves(state: TrainState, folder: Path, location: Location) -> list[SaveMethod]:
    saver = AsyncSaver(state, CheckpointStore(folder), location=location)
    saver.preallocate()
    while saver.busy:
        time.sleep(0.05)

    def begin() -> None:
        number = next(numbers)
        saver.write(saver.capture(number), number, {})

    def over() -> bool:
        return saver._save_task is None or saver._save_task.done

    def end() -> None:
        outcome = saver.result(wait=True)
        if outcome is None or outcome.error:
            raise RuntimeError(f"not saved: {outcome.error if outcome else 'no save was running'}")

    numbers = itertools.count(1)
    return [SaveMethod(begin, saver.before_update, over, end)] * SAVES_PER_METHOD


def _torch_save(loop: StepLoop, root: Path) -> SaveMethod:
    return SaveMethod(lambda: torch.save(_state(loop), root / "plain.pt"), _no_op, lambda: True, _no_op)


def _dcp_save(loop: StepLoop, folder: Path) -> SaveMethod:
    futures: list[Any] = []

    def begin() -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            futures.append(dcp.async_save(_state(loop), checkpoint_id=str(folder)))

    def over() -> bool:
        return futures[0].done()

    return SaveMethod(begin, _no_op, over, lambda: futures.pop().result())


def _state(loop: StepLoop) -> dict[str, Any]:
    return {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}


def _no_op() -> None:
    pass


def _line(name: str, loop: StepLoop, make: Callable[[], list[SaveMethod]]) -> str:
    stalls, calls, step_ratios, write_seconds = [], [], [], []
    median_step = 0.0
    for method in make():
        median_step = median_step or _median_step_without_save(loop)  # after the method has allocated its buffers
        times = loop.timed_steps(method)
        write_start = time.perf_counter()
        while not method.over() and time.perf_counter() - write_start < MAX_WRITE_SECONDS:
            step_ratios.append(loop.timed_steps().median_step / median_step)
        method.end()
        write_seconds.append(time.perf_counter() - write_start)
        stalls.append(1e3 * times.stall)
        calls.append(1e3 * times.call_seconds)
    training = f"{statistics.median(step_ratios):.3f}" if step_ratios else "-"
    return (
        f"| {name} | {stalls[0]:.1f} | {statistics.median(stalls[1:]):.1f} | {max(stalls[1:]):.1f} |"
        f" {statistics.median(calls):.1f} | {training} | {statistics.median(write_seconds):.1f} |"
    )


def _restore(loop: StepLoop, state: TrainState, root: Path) -> str:
    """Time a restore against reading the same files once, both from a warm page cache."""
    newest = CheckpointStore(root / "device").newest()
    if newest is None:
        return "restore: no checkpoint was saved"
    files = [path for path in newest.folder.iterdir() if path.is_file()]

    def read() -> float:
        start = time.perf_counter()
        for path in files:
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
        return time.perf_counter() - start

    def restore() -> float:
        start = time.perf_counter()
        load_checkpoint(newest.folder, state, AsyncSaver(state, CheckpointStore(root)).names())
        loop.synchronize()
        return time.perf_counter() - start

    read()
    reads, restores = [read() for _ in range(3)], [restore() for _ in range(3)]
    ratio = statistics.median(restores) / statistics.median(reads)
    return f"restore: {statistics.median(restores):.2f} s, {ratio:.2f}x reading the files once"

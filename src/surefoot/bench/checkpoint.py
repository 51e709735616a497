"""`surefoot bench checkpoint`: what a save costs the training beside it, against the usual ways to save."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from surefoot.bench.overhead import machine
from surefoot.models.decoder import SIZES, Decoder, count_parameters
from surefoot.state.capture import Whole
from surefoot.state.disk.together import put_together
from surefoot.state.home import in_words
from surefoot.state.saving import Saving
from surefoot.state.store import Store

SECONDS = {"10m": 4.0, "124m": 8.0, "1.3b": 20.0}
"""Training beside each save: long enough for most of it to be written meanwhile."""
SHAPE = {"10m": (8, 128), "124m": (8, 1024), "1.3b": (4, 1024)}


@dataclass(slots=True)
class Work:
    """A decoder that trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: str
    batch: torch.Tensor

    def step(self) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(self.batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, steps: int, before: dict[int, Callable[[], object]]) -> float:
        """Seconds for so many steps, with something done before some of them."""
        self.wait()
        start = time.perf_counter()
        for k in range(steps):
            if k in before:
                before[k]()
            self.step()
        self.wait()
        return time.perf_counter() - start


def main(size: str, device: str | None, folder: Path | None, say: Callable[[str], None]) -> str:
    """The table, in words."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    work = _work(size, device)
    for _ in range(5):
        work.step()
    once = statistics.median(work.timed(1, {}) for _ in range(5))
    steps = max(10, round(SECONDS[size] / once))
    plain = [work.timed(steps, {}) for _ in range(2)]
    whole = Whole(work.model, work.optimizer)
    nbytes = sum(whole.look().nbytes.values())
    told = (
        f"{count_parameters(work.model) / 1e6:.0f} M parameters with AdamW, {in_words(nbytes)}; {machine(device)};"
        f" {steps} steps of {1e3 * min(plain) / steps:.1f} ms beside each save"
    )
    lines = [
        told,
        "| save | stall in all, ms | the call, ms | written after, s |",
        "|---|---|---|---|",
    ]
    root = Path(tempfile.mkdtemp(dir=folder))
    try:
        for name, ways in _ways(work, whole, root).items():
            say(name)
            lines += [
                _line(name if k == 0 else f"{name}, again", work, steps, plain, way) for k, way in enumerate(ways)
            ]
        lines.append(_restore(work, whole, root))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return "\n".join(lines)


def _work(size: str, device: str) -> Work:
    torch.manual_seed(0)
    config = SIZES[size]
    model = Decoder(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    rows, length = SHAPE[size] if device == "cuda" else (1, 32)
    batch = torch.randint(0, config.vocab, (rows, min(length, config.context - 1) + 1), device=device)
    return Work(model, optimizer, device, batch)


Way = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]
"""Begin a save; let the next step wait for what it must; wait for the end."""


def _ways(work: Work, whole: Whole, root: Path) -> dict[str, Sequence[Way]]:
    found: dict[str, Sequence[Way]] = {}
    for home in ("device", "host") if work.device == "cuda" else ("device",):
        saving = Saving(whole, Store(root / home), home=home)
        saving.prepare()
        while saving.busy:
            time.sleep(0.05)
        told = "beside the model" if home == "device" else "no room beside the model"
        found[f"surefoot, {told}"] = [_surefoot(saving, k) for k in (1, 2)]
    found["torch.save"] = [(lambda: torch.save(_state(work), root / "plain.pt"), _nothing, _nothing)]
    if dist.is_available():
        found["DCP async_save"] = [_dcp(work, root / f"dcp{k}") for k in (1, 2)]
    return found


def _surefoot(saving: Saving, number: int) -> Way:
    def begin() -> None:
        saving.write(saving.take(number), number, {})

    def end() -> None:
        outcome = saving.outcome(wait=True)
        if outcome is None or outcome.error:
            raise RuntimeError(f"not saved: {outcome.error if outcome else 'nothing was under way'}")

    return begin, saving.settle, end


def _dcp(work: Work, folder: Path) -> Way:
    held: list[Any] = []

    def begin() -> None:
        if not dist.is_initialized():
            store = dist.HashStore()
            dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held.append(dcp.async_save(_state(work), checkpoint_id=str(folder)))

    def end() -> None:
        held.pop().result()

    return begin, _nothing, end


def _state(work: Work) -> dict[str, Any]:
    return {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}


def _nothing() -> None:
    pass


def _line(name: str, work: Work, steps: int, plain: Sequence[float], way: Way) -> str:
    begin, settle, end = way
    call = 0.0

    def timed() -> None:
        nonlocal call
        start = time.perf_counter()
        begin()
        settle()
        call = time.perf_counter() - start

    spent = work.timed(steps, {2: timed})
    start = time.perf_counter()
    end()
    after = time.perf_counter() - start
    stall = 1e3 * (spent - statistics.median(plain))
    return f"| {name} | {stall:.1f} | {1e3 * call:.1f} | {after:.1f} |"


def _restore(work: Work, whole: Whole, root: Path) -> str:
    """A restore against reading the same files once, both from a warm cache."""
    kept = Store(root / "device").newest()
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
        put_together(kept.folder, whole, Saving(whole, Store(root)).names())
        work.wait()
        return time.perf_counter() - start

    read()
    reads, restores = [read() for _ in range(3)], [restore() for _ in range(3)]
    ratio = statistics.median(restores) / statistics.median(reads)
    return f"restore: {statistics.median(restores):.2f} s, {ratio:.2f}x reading the files once"

"""Run by torchrun with two ranks that differ on purpose or whose loops differ: both judge and act alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_damaged import POLICY, batch_of, equal_everywhere, model_of
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import surefoot
from surefoot.records import StepMetrics

STEPS = 60
AT = 36
Hook = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def average(model: nn.Module, *, gradients: bool) -> None:
    for p in model.parameters():
        tensor = p.grad if gradients else p.data
        assert tensor is not None
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def judged(row: StepMetrics) -> dict[str, str]:
    """The judged fields of a row, without times, memory and reported values, which may differ between ranks."""
    not_judged = (
        "time",
        "seconds",
        "data_wait",
        "seconds_left",
        "utilisation",
        "tokens",
        "eval_loss",
        "bad_microbatch",
        "num_microbatches",
    )
    fields = asdict(row).items()
    return {name: str(value) for name, value in fields if name not in not_judged and not name.startswith("memory")}


def nudge(step: int, model: nn.Module, *_: Any) -> None:
    if step == AT and dist.get_rank() == 1:
        next(model.parameters()).data[0, 0] += 1e-4


def train(
    where: Path,
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    before: Hook | None = None,
    after: Hook | None = None,
    keep: Callable[[int], bool] = lambda step: False,
    scaler: Any = None,
    uneven: bool = False,
    spoil: Callable[[int], bool] = lambda step: False,
    **options: Any,
) -> dict[str, Any]:
    model = model or model_of(3)
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=3e-3)
    guard = surefoot.attach(model, optimizer, run_dir=where, **{"policy": POLICY, "scaler": scaler} | options)
    events: list[dict[str, Any]] = []
    guard.on_event(lambda event: events.append(event.as_json()))
    stopped, rows = "", {}
    for step in range(STEPS):
        x, y = batch_of(step, dist.get_rank())
        if uneven and dist.get_rank() == 1:
            x, y = x[:20], y[:20]
        loss = nn.functional.mse_loss(model(x), y)
        loss = guard.watch(loss * float("nan") if spoil(step) else loss, (x, y))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if before is not None:
            before(step, model, optimizer)
        try:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        except surefoot.TrainingStopped as why:
            stopped = str(why)
            break
        if scaler is not None:
            scaler.update()
        if guard.latest is not None:
            rows[guard.latest.attempt] = judged(guard.latest)
        if not keep(step):
            optimizer.zero_grad()
        if after is not None:
            after(step, model, optimizer)
    lost, step_count = guard.disabled, guard.step
    guard.close()
    return {
        "stopped": stopped,
        "lost": lost,
        "step": step_count,
        "rows": rows,
        "equal": equal_everywhere(model),
        "rewound": [e["values"] for e in events if e["kind"] == "note" and e["name"] == "rewound"],
        "decided": [[e["action"], e["cause"]] for e in events if e["kind"] == "decision" and e["action"] != "refuse"],
        "findings": [[e["detector"], e["severe"], e["detail"]] for e in events if e["kind"] == "finding"],
    }


def own_models(where: Path) -> dict[str, Any]:
    """Each rank trains a model of its own."""
    model = model_of(3).module
    assert isinstance(model, nn.Module)
    with torch.no_grad():
        next(model.parameters()).add_(0.1 * dist.get_rank())
    return train(where, model=model)


def local_sgd(where: Path) -> dict[str, Any]:
    """Gradients are averaged at first; later each rank trains alone, and weights are averaged every five steps."""
    model = model_of(3).module
    assert isinstance(model, nn.Module)

    def before(step: int, *_: Any) -> None:
        if step < 28:
            average(model, gradients=True)

    def hooked(step: int, *_: Any) -> None:
        if step % 5 == 4:
            average(model, gradients=False)

    return train(where, model=model, before=before, after=hooked)


def ddp_then_local(where: Path) -> dict[str, Any]:
    """The same with DDP, whose gradient sync is switched off."""
    model = model_of(3)

    def after(step: int, *_: Any) -> None:
        if step == 28:
            model.require_backward_grad_sync = False  # as under no_sync

    return train(where, model=model, after=after)


def averaged_by_loop(where: Path, *, harmed: bool) -> dict[str, Any]:
    """The loop itself averages gradients after backward."""
    model = model_of(3).module
    assert isinstance(model, nn.Module)
    return train(where, model=model, before=lambda *_: average(model, gradients=True), after=nudge if harmed else None)


def raise_lr(step: int, _: nn.Module, optimizer: Any) -> None:
    if step == AT and dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] *= 20.0


def scaled(where: Path, *, ranks: tuple[int, ...], until: int) -> dict[str, Any]:
    """Loss scaling skips the steps in which a rank's loss is NaN."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return train(where, scaler=scaler, spoil=lambda step: AT <= step < until and dist.get_rank() in ranks)


def zero(where: Path) -> dict[str, Any]:
    model = model_of(3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=3e-3)
    return train(where, model=model, optimizer=optimizer, after=nudge)


TRIALS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "own models": own_models,
    "local sgd": local_sgd,
    "ddp then local": ddp_then_local,
    "averaged by the loop": lambda where: averaged_by_loop(where, harmed=False),
    "averaged by the loop, nudged": lambda where: averaged_by_loop(where, harmed=True),
    "no snapshots": lambda where: train(where, after=nudge, snapshot_memory=False),
    "observed": lambda where: train(where, after=nudge, policy=replace(POLICY, observe=True)),
    "gradients kept on one rank": lambda where: train(where, keep=lambda step: step >= AT and dist.get_rank() == 1),
    "lr raised on one rank": lambda where: train(where, after=raise_lr),
    "nan under loss scaling, on one rank": lambda where: scaled(where, ranks=(1,), until=AT + 6),
    "nan under loss scaling, on all ranks": lambda where: scaled(where, ranks=(0, 1), until=AT + 6),
    "zero": zero,
    "uneven batches": lambda where: train(where, uneven=True),
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    out = Path(sys.argv[1])
    results = {name: trial(out / name) for name, trial in TRIALS.items()}
    (out / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

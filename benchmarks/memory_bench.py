"""`surefoot bench memory`: runs out of memory at 20 moments of a small run of the engine, and compares it with one that
never does."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import surefoot
from benchmarks.planted_memory import PLANT, Limit
from surefoot import parallel
from surefoot.guard.attach import Guard
from surefoot.guard.update_restart import NOTE
from surefoot.train.build import build
from surefoot.train.loop import train
from surefoot.train.memory_recovery import MemoryRecovery
from surefoot.train.recipe import Recipe
from surefoot.train.recipe.errors import RecipeOrigin
from surefoot.train.recipe.validate_recipe import validate
from surefoot.train.session import Invocation, attach_guard

STEPS, SIZE = 24, 8
TOLERANCE = 1e-4
"""Largest difference of a loss, relative: sums in another order, over the updates after it."""
SHORTAGE = 6
"""Updates that a shortage lasts."""
PLANTED = (
    *(Limit("forward", samples, first=first) for samples, first in ((4, 0), (4, 7), (2, 3), (1, 12), (2, 20))),
    *(Limit("backward", samples, first=first) for samples, first in ((4, 0), (4, 9), (2, 5), (1, 14), (2, 21))),
    *(Limit("step", 0, first=first, times=1) for first in (0, 1, 8, 16)),
    Limit("half step", 0, first=0, times=1),
    *(Limit("evaluation", samples, first=first) for samples, first in ((4, 4), (2, 4), (1, 9), (2, 14), (1, 19))),
)
"""The moments on a CPU."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One run that ran out of memory."""

    name: str
    failures: int
    ended: str
    """Empty if it went on to its end."""
    smallest: int
    """Samples in a micro-batch, at the least."""
    same_batch: bool
    difference: float
    """The largest relative difference of a loss or an eval loss."""

    @property
    def right(self) -> bool:
        return not self.ended and self.failures > 0 and self.same_batch and self.difference <= TOLERANCE

    def as_row(self) -> str:
        goes_on = "yes" if not self.ended else f"no: {self.ended}"
        same = "same" if self.same_batch else "NOT the same"
        return f"| {self.name} | {self.failures} | {goes_on} | {self.smallest} | {same} | {self.difference:.1e} |"


@dataclass(frozen=True, slots=True)
class Course:
    """What a run has done."""

    losses: Sequence[float]
    samples: Sequence[float]
    evals: Sequence[float]
    failures: int
    smallest: int
    ended: str


class _Listener:
    """Calls back after every update, and collects the losses on held-out data."""

    def __init__(self, after: Callable[[int], None] | None = None) -> None:
        self.evals: list[float] = []
        self._after, self._updates = after, 0

    def updated(self, guard: Guard, tokens: int | None) -> None:
        self._updates += 1
        if self._after is not None:
            self._after(self._updates)

    def evaluated(self, guard: Guard, step: int, loss: float | None) -> None:
        self.evals.append(math.nan if loss is None else loss)


def main(device: str, *, say: Callable[[str], None]) -> list[Moment]:
    """Run all moments; on a GPU its memory is taken away, else a limit is planted."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = _recipe(folder, device)
        undisturbed = _train(recipe, folder / "undisturbed")
        if undisturbed.ended or undisturbed.failures:
            raise RuntimeError(f"the undisturbed run failed: {undisturbed.ended or 'out of memory'}")
        moments: list[Moment] = []
        shortages = _on_gpu() if device == "cuda" else _on_cpu()
        for number, (title, begin, after, end) in enumerate(shortages):
            begin()
            try:
                course = _train(recipe, folder / str(number), after)
            finally:
                end()
            moments.append(_compare(title, course, undisturbed))
            say(f"{title}: {'right' if moments[-1].right else 'WRONG'}")
        return moments


def report(moments: Sequence[Moment], device: str) -> str:
    """The table."""
    right = sum(moment.right for moment in moments)
    where = torch.cuda.get_device_name() if device == "cuda" else "planted limits on the CPU"
    head = (
        f"{right} of {len(moments)} runs went on with the same updates ({where}, torch {torch.__version__}, {STEPS} "
        f"updates of {SIZE} samples)."
    )
    lines = [
        head,
        "",
        "| Out of memory | Times | Goes on | Samples at a time after | Effective batch | Largest loss difference |",
        "|---|---|---|---|---|---|",
        *(moment.as_row() for moment in moments),
    ]
    return "\n".join(lines)


Shortage = tuple[str, Callable[[], None], Callable[[int], None] | None, Callable[[], None]]
"""Its name; what begins it, what is called after every update, and what ends it."""


def _on_cpu() -> Iterator[Shortage]:
    def plant(*limits: Limit) -> None:
        PLANT.limits, PLANT.hits, PLANT.updates = list(limits), [], 0

    for limit in PLANTED:
        stepping = "step" in limit.where
        until = limit if stepping else replace(limit, end=limit.first + SHORTAGE)
        title = f"{limit.where}, update {limit.first}" + ("" if stepping else f", room for {limit.samples}")
        yield title, lambda until=until: plant(until), None, plant


def _on_gpu() -> Iterator[Shortage]:
    """Before each of 20 updates memory is taken away, so that half of what its update needs is left."""
    total = torch.cuda.get_device_properties(0).total_memory
    for first in range(1, 21):

        def after(update: int, first: int = first) -> None:
            if update == first:
                torch.cuda.empty_cache()
                held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
                torch.cuda.set_per_process_memory_fraction(min(1.0, (held + 0.5 * (peak - held)) / total))
            elif update == first + SHORTAGE:
                torch.cuda.set_per_process_memory_fraction(1.0)

        yield f"before update {first}", torch.cuda.reset_peak_memory_stats, after, _give_back


def _give_back() -> None:
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def _compare(title: str, course: Course, undisturbed: Course) -> Moment:
    same = list(course.samples) == list(undisturbed.samples)
    pairs = ((course.losses, undisturbed.losses), (course.evals, undisturbed.evals))
    difference = math.inf
    if all(len(found) == len(expected) for found, expected in pairs):
        found, expected = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        difference = float(np.abs(found / expected - 1).max())
    return Moment(title, course.failures, course.ended, course.smallest, same, difference)


def _train(recipe: Recipe, run_dir: Path, after: Callable[[int], None] | None = None) -> Course:
    parts = build(recipe.model_copy(update={"run_dir": str(run_dir)}), parallel.init_distributed(recipe.device))
    listener, ended = _Listener(after), ""
    with attach_guard(parts, Invocation("bench memory"), parts.recipe) as guard:
        memory = MemoryRecovery(parts, guard)
        try:
            train(parts, guard, listener, memory)
        except Exception as error:
            ended = f"{type(error).__name__}: {error}".splitlines()[0]
    run = surefoot.read(run_dir)
    scalars, plans = run.scalars, [e["values"] for e in run.events if e.get("name") == NOTE]
    return Course(
        losses=scalars["loss"].tolist(),
        samples=scalars["samples"].tolist(),
        evals=listener.evals,
        failures=memory.failures,
        smallest=min([SIZE, *(min(plan["rows"], plan["eval_rows"]) for plan in plans)]),
        ended=ended,
    )


def _recipe(folder: Path, device: str) -> Recipe:
    """A small decoder on padded texts; on a GPU large enough that its activations are most of its memory."""
    width, layers, context = (256, 4, 512) if device == "cuda" else (32, 2, 32)
    rng = random.Random(0)
    for name, count in (("texts", 100), ("held_out", 20)):
        texts = ("".join(rng.choices("abcde ", k=rng.randint(context // 4, context))) for _ in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain: dict[str, Any] = {
        "name": "memory",
        "device": device,
        "steps": STEPS,
        "model": {"factory": "surefoot.models:decoder", "vocab": 256, "context": context}
        | {"width": width, "layers": layers, "heads": 4},
        "data": {"kind": "text", "context": context, "packing": False}
        | {"path": str(folder / "texts.jsonl"), "held_out_path": str(folder / "held_out.jsonl")},
        "loss": {"factory": "benchmarks.planted_memory:sum_loss"},
        "batch": {"size": SIZE},
        "optimizer": {"name": "benchmarks.planted_memory:AdamW", "lr": 1e-3, "weight_decay": 0.1},
        "evaluation": {"every": 5},
        "speed": {"threads": 1},
    }
    return validate(plain, RecipeOrigin("surefoot bench memory"))

"""Three runs of one small model: undisturbed, broken by three planted faults, and kept on its feet by surefoot."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

import surefoot
from surefoot.data import batches, split, standard_library
from surefoot.edge import switched_off
from surefoot.models import Decoder, DecoderConfig
from surefoot.train.story import Story

CONFIG = DecoderConfig(vocab=256, width=96, layers=2, heads=4, context=64)
BATCH = 24
RATE = 3e-3
POLICY = surefoot.Policy(ring_every=20, weights_every=1)
"""In a run of minutes states to go back to come sooner. Damaged moments show in the size of the first update after the
damage and hardly anywhere else, so the weights are looked at after every one: at the default of every hundredth, or at
every third, this demo does not end well."""
DAMAGED = 3
"""Steps in a row at which the moments are damaged."""
FAULTS = {
    "moments": (
        0.31,
        "moments / 10,000",
        "damaged moments: Adam's second ones are divided by 10,000, three steps in a row",
    ),
    "rate": (0.56, "rate x 10", "a rate ten times too high, from here to the end"),
    "poison": (
        0.84,
        "poisoned batch",
        "a poisoned batch: one text is all padding, its mean loss is 0 / 0, not a number",
    ),
}
"""What is planted: after which share of the steps, its name, and what it is."""
EXAMS = 25
"""Evaluations on text the model never saw, over a whole run; the result is the mean of the last five."""
console = Console(highlight=False, markup=False, soft_wrap=True)


@dataclass
class Result:
    """What one run leaves behind: the loss of every step, and now and then the loss on text it never saw."""

    losses: list[float] = field(default_factory=list)
    exams: list[float] = field(default_factory=list)
    acts: dict[int, str] = field(default_factory=dict)
    """What surefoot did, at which step."""

    @property
    def held_out(self) -> float:
        return sum(self.exams[-5:]) / len(self.exams[-5:]) if self.exams else math.nan


@functools.cache
def library() -> tuple[Tensor, Tensor]:
    """The text to learn from and the text to be examined on, looked up once for all runs."""
    return split(standard_library(2_000_000))


def batch_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean loss of each text over the bytes that count, then over the texts."""
    tokens, counts = batch["tokens"], batch["counts"]
    each = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    return ((each * counts).sum(1) / counts.sum(1)).mean()


def texts(corpus: Tensor, *, seed: int, poison: int | None = None) -> Iterator[dict[str, Tensor]]:
    """Endless batches; the one whose step is named is broken the way real data is."""
    for step, tokens in enumerate(batches(corpus, batch=BATCH, context=CONFIG.context, seed=seed)):
        batch = {"tokens": tokens, "counts": torch.ones(BATCH, CONFIG.context)}
        if step == poison:
            batch["counts"][3] = 0.0  # nothing counts in this text, and its mean is 0 / 0
        yield batch


def plant(step: int, faults: dict[str, int], optimizer: Optimizer) -> None:
    """The two faults that are none of the data: a damaged optimizer, and a schedule gone wrong."""
    if "moments" in faults and faults["moments"] <= step < faults["moments"] + DAMAGED:
        for state in optimizer.state.values():
            state["exp_avg_sq"] *= 1e-4
    if "rate" in faults and step >= faults["rate"]:
        for group in optimizer.param_groups:
            group["lr"] = 10 * RATE


def train(*, steps: int, seed: int, faults: dict[str, int], run_dir: Path | None = None) -> Result:
    """An ordinary training loop; the two lines of surefoot are those with `guard =` and `guard.watch`."""
    torch.manual_seed(seed)
    corpus, unseen = library()
    model = Decoder(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, policy=POLICY) if run_dir else None

    exam = list(itertools.islice(texts(unseen, seed=seed), 10))
    # What surefoot finds about the machine is no part of this story: a laptop has other things to do too.
    story = Story(say, counted="attempt", machine=False)
    if guard:
        guard.on_event(story.event)
    result = Result()
    for step, batch in zip(range(steps), texts(corpus, seed=seed, poison=faults.get("poison")), strict=False):
        for name in (name for name, at in faults.items() if at == step):
            say(step, "planted", FAULTS[name][2], "red")
        plant(step, faults, optimizer)
        loss = batch_loss(model, batch)
        if guard:
            loss = guard.watch(loss, batch)
        loss.backward()
        try:
            optimizer.step()
        except surefoot.TrainingStopped as why:
            say(step, "stopped", str(why), "red")
            break
        optimizer.zero_grad()

        result.losses.append(loss.item())
        if guard and (row := guard.latest):
            story.row(step=row.step, attempt=row.attempt, loss=row.loss)
        if (step + 1) % (steps // EXAMS) == 0:
            with torch.no_grad():
                result.exams.append(sum(batch_loss(model, each).item() for each in exam) / len(exam))
        if (step + 1) % (steps // 5) == 0:
            say(step, "", f"loss {loss.item():.3f}")
        if all(map(math.isnan, result.losses[-20:])):
            say(step, "dead", "still NaN after 20 steps: the bad number is in every weight, and nothing gets it out")
            result.exams.append(math.nan)
            break
    if guard:
        guard.close()
    result.acts = story.acts
    return result


def say(step: int, label: str, words: str, style: str | None = None) -> None:
    """One line of a story; what is too long for the terminal goes on below its own beginning."""
    begin = f"   step {step:4}   {label:8} "
    width = max(80, min(console.width, 120)) if console.is_terminal else 120
    console.print(textwrap.fill(begin + words, width, subsequent_indent=" " * len(begin)), style=style)


@contextmanager
def told_once() -> Iterator[None]:
    """Keep surefoot's own warnings off the console: the story tells them. Its errors still come through."""
    log = logging.getLogger("surefoot")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def compare(results: dict[str, Result]) -> None:
    """The final losses side by side."""
    table = Table("   loss on text it never saw", "", "against no faults", box=None, pad_edge=False)
    best = next(iter(results.values())).held_out
    for name, result in results.items():
        if math.isnan(result.held_out):
            alive = [loss for loss in result.exams if math.isfinite(loss)]
            table.add_row(f"   {name}", "NaN", f"dead; before that {alive[-1]:.3f}, x {alive[-1] / best:.3f}")
        else:
            table.add_row(f"   {name}", f"{result.held_out:.3f}", f"x {result.held_out / best:.3f}")
    console.print(table)


def smooth(result: Result) -> list[float]:
    """A moving average, with a gap where a loss is NaN or off the scale; it begins anew where the run went back."""
    average, points = result.losses[0], []
    for step, loss in enumerate(result.losses):
        fine = loss < 100
        share = 1.0 if result.acts.get(step - 1, "").startswith("back") else 0.2
        average += share * (loss - average) if fine else 0.0
        points.append(average if fine else math.nan)
    return points


def draw(results: dict[str, Result], faults: dict[str, int], path: Path) -> Path | None:
    """The loss of the three runs in one picture, with a mark where surefoot acted; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    red, green = "#d1495b", "#14606b"
    figure = Figure(figsize=(11, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    curves = {name: smooth(result) for name, result in results.items()}
    styles = {"color": "#c9ced6", "lw": 7}, {"color": red, "lw": 2.5}, {"color": green, "lw": 1.5}
    for (name, curve), style in zip(curves.items(), styles, strict=True):
        axes.plot(curve, label=name, solid_capstyle="round", **style)
    reference, broken, guarded = curves.values()
    bottom, top = 0.75 * min(reference), 1.03 * max(reference)
    for name, at in faults.items():
        axes.axvline(at, color="#8a929e", lw=1, ls=":", zorder=0)
        axes.text(at, top, FAULTS[name][1], color="#5b6370", ha="center", va="bottom")
    death = next((step for step, loss in enumerate(broken) if math.isnan(loss)), 0) - 1
    if death > 0:
        axes.plot(death, broken[death], "X", color=red, ms=12, mec="white", zorder=5)
        axes.annotate("NaN from here on", (death, broken[death]), (10, 8), color=red, textcoords="offset points")
    for step, act in results["faults and surefoot"].acts.items():
        at = max(0, min(step, len(guarded)) - 1)
        axes.plot(at, guarded[at], "o", color="white", mec=green, mew=2, ms=8, zorder=6)
        axes.plot([at, at], [guarded[at], bottom * 1.14], color=green, lw=0.8)
        axes.text(
            at, bottom * 1.12, act, color=green, ha="center", va="top", bbox={"fc": "white", "ec": "none", "pad": 1}
        )
    axes.set(xlabel="step of the loop", ylabel="training loss, nats per byte (moving average)", ylim=(bottom, top))
    axes.set_title("Three faults in one run, with and without surefoot", loc="left", weight="bold", pad=24)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.09, 1.0))
    figure.savefig(path)
    return path


def show(steps: Annotated[int, typer.Option(min=300)] = 500, out: Path = Path("out/demo"), seed: int = 0) -> None:
    """Watch a small model survive three planted faults that ruin the same training loop without surefoot."""
    if switched_off():
        typer.echo("SUREFOOT=off is set, so there is nothing to show. Unset it and try again.", err=True)
        raise typer.Exit(2)
    started = time.monotonic()
    torch.set_num_threads(1)  # for so small a model more threads only wait for each other
    out.mkdir(parents=True, exist_ok=True)
    run_dir = next(path for number in itertools.count(1) if not (path := out / f"run-{number}").exists())
    faults = {name: int(share * steps) for name, (share, _, _) in FAULTS.items()}
    console.print("A small language model learns Python from the source of its library. Three faults are planted:")
    for name, at in faults.items():
        say(at, "", FAULTS[name][2])
    console.print("\n1  The loop without the faults, to compare with", style="bold")
    results = {"no faults": train(steps=steps, seed=seed, faults={})}
    console.print("\n2  The same loop with the faults", style="bold")
    results["faults"] = train(steps=steps, seed=seed, faults=faults)
    console.print("\n3  The same loop with the faults and two lines of surefoot", style="bold")
    with told_once():
        results["faults and surefoot"] = train(steps=steps, seed=seed, faults=faults, run_dir=run_dir)

    console.print()
    compare(results)
    picture = draw(results, faults, out / "loss.png")
    console.print(f"\nThe picture   {picture or 'not drawn, matplotlib is missing: pip install matplotlib'}")
    console.print(f"The journal   {run_dir}   to look inside: surefoot.read({str(run_dir)!r}).events")
    console.print("\nIn your own loop it takes the same two lines:", style="bold")
    console.print(
        '   guard = surefoot.attach(model, optimizer, run_dir="runs/first", policy=policy)   # before the loop'
    )
    console.print("   loss = guard.watch(loss, batch)   # in the loop, before backward")
    console.print(
        f"Here policy = surefoot.Policy(ring_every={POLICY.ring_every}, weights_every={POLICY.weights_every}): "
        "the run is short, and the default does not cure the damaged moments."
    )
    console.print(f"\nThis took {time.monotonic() - started:.0f} s. With other data: python -m surefoot.demo --seed 1")


if __name__ == "__main__":
    typer.run(show)

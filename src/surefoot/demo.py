"""Three runs of one small model: undisturbed, broken by two planted faults, and kept on its feet by surefoot."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import surefoot
from surefoot.data import batches, split, standard_library
from surefoot.edge import switched_off
from surefoot.models import Decoder, DecoderConfig
from surefoot.records import Verdict

CONFIG = DecoderConfig(vocab=256, width=96, layers=2, heads=4, context=64)
BATCH = 24
console = Console(highlight=False, markup=False, soft_wrap=True)


@dataclass
class Result:
    """What one run leaves behind: the loss of every step, and the loss on text it never saw."""

    losses: list[float] = field(default_factory=list)
    held_out: float = math.nan


def batch_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean loss of each text over the bytes that count, then over the texts."""
    tokens, counts = batch["tokens"], batch["counts"]
    each = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    return ((each * counts).sum(1) / counts.sum(1)).mean() * batch["weight"]


def texts(corpus: Tensor, *, seed: int, poison: int = -1, burst: int = -1) -> Iterator[dict[str, Tensor]]:
    """Endless batches; the two whose steps are named are broken the way real data is."""
    for step, tokens in enumerate(batches(corpus, batch=BATCH, context=CONFIG.context, seed=seed)):
        batch = {"tokens": tokens, "counts": torch.ones(BATCH, CONFIG.context), "weight": torch.tensor(1.0)}
        if step == poison:
            batch["counts"][3] = 0.0  # a text that is all padding: the mean over its bytes is 0 / 0
        if step == burst:
            batch["weight"] *= 1e6  # a weight in the wrong unit
        yield batch


def train(*, steps: int, seed: int, faults: dict[str, int], run_dir: Path | None = None) -> Result:
    """An ordinary training loop; the two lines of surefoot are those with `guard =` and `guard.watch`."""
    torch.manual_seed(seed)
    corpus, unseen = split(standard_library(2_000_000))
    model = Decoder(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir) if run_dir else None

    result = Result()
    for step, batch in zip(range(steps), texts(corpus, seed=seed, **faults), strict=False):
        loss = batch_loss(model, batch)
        if guard:
            loss = guard.watch(loss, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        result.losses.append(loss.item())
        if step in faults.values() or (step + 1) % (steps // 5) == 0:
            console.print(f"   step {step:4}   loss {loss.item():.4g}")
        if all(map(math.isnan, result.losses[-20:])):
            console.print(f"   step {step:4}   still NaN after 20 steps: this run is dead")
            break
    if guard:
        guard.close()
    validation = texts(unseen, seed=seed)
    with torch.no_grad():
        result.held_out = sum(batch_loss(model, next(validation)).item() for _ in range(20)) / 20
    return result


def tell(run: surefoot.Run) -> None:
    """What surefoot did, and what it only noticed, from the journal it kept."""
    done = {"refuse": "refused the update", "stop": "stopped the run"}
    decided = {event["attempt"] for event in run.events if event["kind"] == "decision"}
    for event in run.events:
        if event["kind"] == "decision":
            said = f"{done.get(event['action'], event['action'])}: {event['reason']}"
        elif event["kind"] == "finding" and event["attempt"] not in decided:
            said = f"noticed: {event['detail']}"
        else:
            continue
        console.print(f"   step {event['attempt']:4}   {said}")


def compare(results: dict[str, Result]) -> None:
    """The final losses side by side."""
    table = Table("   loss (lower is better)", "last 20 steps", "text it never saw", box=None, pad_edge=False)
    for name, result in results.items():
        recent = sum(result.losses[-20:]) / len(result.losses[-20:])
        table.add_row(f"   {name}", f"{recent:.2f}", f"{result.held_out:.2f}")
    console.print(table)


def smooth(losses: list[float]) -> list[float]:
    """A moving average, with a gap where a loss is NaN or off the scale."""
    average, points = losses[0], []
    for loss in losses:
        fine = loss < 100
        average = 0.85 * average + 0.15 * loss if fine else average
        points.append(average if fine else math.nan)
    return points


def draw(results: dict[str, Result], refused: dict[int, str], path: Path) -> Path | None:
    """The loss of the three runs in one picture, with a mark where an update was refused; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(10, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    curves = {name: smooth(result.losses) for name, result in results.items()}
    styles = {"color": "#c9ced6", "lw": 7}, {"color": "#d1495b", "lw": 3.5}, {"color": "#14606b", "lw": 1.5}
    for (name, curve), style in zip(curves.items(), styles, strict=True):
        axes.plot(curve, label=name, solid_capstyle="round", **style)
    reference, broken, guarded = curves.values()
    bottom, top = 0.85 * min(reference), 1.03 * max(reference)
    death = next(step for step, loss in enumerate(broken) if math.isnan(loss)) - 1
    axes.plot([death, death], [broken[death], bottom], color="#d1495b", lw=1.5, ls="--")
    axes.plot(death, bottom, "X", color="#d1495b", ms=13, mec="white", clip_on=False, zorder=5)
    axes.text(death - 0.02 * len(reference), bottom * 1.05, "bare loop: NaN from here on", color="#d1495b", ha="right")
    for step, fault in refused.items():
        axes.plot(step, guarded[step - 1], "o", color="white", mec="#14606b", mew=2, ms=8, zorder=6)
        axes.annotate(
            f"{fault}:\nupdate refused",
            (step, guarded[step - 1]),
            (30, 60),
            color="#14606b",
            textcoords="offset points",
            ha="center",
            arrowprops={"arrowstyle": "-", "color": "#14606b"},
        )
    axes.set(xlabel="step", ylabel="training loss, nats per byte (moving average)", ylim=(bottom, top))
    axes.set_title("One poisoned batch, one gradient burst: with and without surefoot", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    return path


def show(steps: Annotated[int, typer.Option(min=100)] = 500, out: Path = Path("out/demo"), seed: int = 0) -> None:
    """Watch a small model survive two planted faults that kill the same training loop without surefoot."""
    if switched_off():
        typer.echo("SUREFOOT=off is set, so there is nothing to show. Unset it and try again.", err=True)
        raise typer.Exit(2)
    started = time.monotonic()
    torch.set_num_threads(1)  # for so small a model more threads only wait for each other
    out.mkdir(parents=True, exist_ok=True)
    run_dir = next(path for number in itertools.count(1) if not (path := out / f"run-{number}").exists())
    poison, burst = int(0.4 * steps), int(0.65 * steps)
    faults = {"poison": poison, "burst": burst}
    console.print(
        "A small language model learns Python from the source of its library. Two faults are planted in its data:\n"
        f"   step {poison:4}   a poisoned batch: one text is all padding, so its mean loss is 0 / 0, not a number\n"
        f"   step {burst:4}   a gradient burst: one batch weighs a million times too much"
    )
    console.print("\n1  The loop without the faults, to compare with", style="bold")
    results = {"no faults": train(steps=steps, seed=seed, faults={})}
    console.print("\n2  The same loop with the faults", style="bold")
    results["faults"] = train(steps=steps, seed=seed, faults=faults)
    console.print("   One bad number went through backward into every weight, and nothing gets it out again.")
    console.print("\n3  The same loop with the faults and two lines of surefoot", style="bold")
    results["faults and surefoot"] = train(steps=steps, seed=seed, faults=faults, run_dir=run_dir)

    console.print("\nWhat surefoot did", style="bold")
    run = surefoot.read(run_dir)
    tell(run)
    console.print()
    compare(results)
    refused = run.scalars["attempt"][run.scalars["verdict"] != Verdict.LANDED]
    names = {poison: "poisoned batch", burst: "gradient burst"}
    picture = draw(results, {step: names.get(step, "trouble") for step in refused.tolist()}, out / "loss.png")
    console.print(f"\nThe picture   {picture or 'not drawn, matplotlib is missing: pip install matplotlib'}")
    console.print(f"The journal   {run_dir}   to look inside: surefoot.read({str(run_dir)!r}).scalars['norm']")
    console.print("\nIn your own loop it takes the same two lines:", style="bold")
    console.print('   guard = surefoot.attach(model, optimizer, run_dir="runs/first")     once, before the loop')
    console.print("   loss = guard.watch(loss, batch)                                     in the loop, before backward")
    console.print(f"\nThis took {time.monotonic() - started:.0f} s. With other data: python -m surefoot.demo --seed 1")


if __name__ == "__main__":
    typer.run(show)

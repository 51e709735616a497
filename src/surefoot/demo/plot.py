"""Plots the losses of the three runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from surefoot.demo.faults import FAULTS
from surefoot.demo.runs import DemoResult
from surefoot.journal.output_files import save_figure


def smooth(result: DemoResult) -> list[float]:
    """A moving average, with a gap where a loss is NaN or off the scale; it restarts after a rewind."""
    average, points = result.losses[0], []
    for step, loss in enumerate(result.losses):
        in_range = loss < 100
        weight = 1.0 if result.actions.get(step - 1, "").startswith(("rewound", "retrained")) else 0.2
        average += weight * (loss - average) if in_range else 0.0
        points.append(average if in_range else math.nan)
    return points


def draw(results: Mapping[str, DemoResult], faults: Mapping[str, int], path: Path) -> None:
    """Plot the three losses, and mark surefoot's actions; raises OutputRefused, or ImportError without matplotlib."""
    from matplotlib.figure import Figure

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
        axes.text(at, top, FAULTS[name].name, color="#5b6370", ha="center", va="bottom")
    death = next((step for step, loss in enumerate(broken) if math.isnan(loss)), 0) - 1
    if death > 0:
        axes.plot(death, broken[death], "X", color=red, ms=12, mec="white", zorder=5)
        axes.annotate("NaN from here on", (death, broken[death]), (10, 8), color=red, textcoords="offset points")
    for step, action in results["faults and surefoot"].actions.items():
        at = max(0, min(step, len(guarded)) - 1)
        axes.plot(at, guarded[at], "o", color="white", mec=green, mew=2, ms=8, zorder=6)
        axes.plot([at, at], [guarded[at], bottom * 1.14], color=green, lw=0.8)
        axes.text(
            at, bottom * 1.12, action, color=green, ha="center", va="top", bbox={"fc": "white", "ec": "none", "pad": 1}
        )
    axes.set(xlabel="update of the loop", ylabel="training loss, nats per byte (moving average)", ylim=(bottom, top))
    axes.set_title("Three faults in one run, with and without surefoot", loc="left", weight="bold", pad=24)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.09, 1.0))
    save_figure(figure, path, force=None)

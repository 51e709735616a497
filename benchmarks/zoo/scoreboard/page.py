"""Writes docs/zoo.md: tables, plots, and a list of all scenarios, rules and published runs."""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import surefoot
from benchmarks.zoo import CONTROLS, FAULTS
from benchmarks.zoo.families import FAMILIES, Split
from benchmarks.zoo.jobs import BARE, SUREFOOT, ZooJob
from benchmarks.zoo.other_rules import ALARM_RULES, INTERVENTION_RULES
from benchmarks.zoo.published_runs import PUBLISHED_RUNS
from benchmarks.zoo.scenario import STRENGTHS, Scenario, ScenarioKind
from benchmarks.zoo.scoreboard.scores import DetectionScore, OutcomeScore
from benchmarks.zoo.scoreboard.tables import ALL, Scoreboard, tables
from surefoot.journal.output_files import check_output, output_file, save_figure

COMMAND = "surefoot bench zoo --page docs"
EXAMPLE = "bad_batch"
"""The fault whose definition is shown."""
_COLUMNS = 6


def write(board: Scoreboard, folder: Path) -> Path:
    """Write zoo.md and its plots into a folder."""
    plots = folder / "zoo"
    plots.mkdir(parents=True, exist_ok=True)
    page = folder / "zoo.md"
    replace = check_output(page, force=None).exists()  # then the plots beside it are surefoot's too
    with output_file(page, force=None) as draft:
        _draw_rules(board, plots / "rules.png", replace=replace)
        _draw_runs(board, plots / "runs.png", replace=replace)
        draft.write_text(_text(board), encoding="utf-8")
    return page


def _text(board: Scoreboard) -> str:
    split = next((s.split for s in board.scenarios), Split.REPORT)
    machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    own = not any(rule.name in board.interventions for rule in (make() for make in INTERVENTION_RULES))
    command = COMMAND.replace("zoo", "zoo --own") if own else COMMAND
    written = f"Written by `{command}` ({split} split; {machine}); every number below was measured."
    written += " Loops of other projects were left out." if own else ""
    return "\n\n".join(
        [
            f"# The zoo\n\n{written}",
            _INTRODUCTION,
            "![detected and cured faults against false alarms, by rule](zoo/rules.png)",
            tables(board).replace("\n## ", "\n### "),
            "## What the runs look like",
            _RUNS_PLOT,
            "![one run of every kind of fault](zoo/runs.png)",
            "## Faults\n\n" + _faults(),
            "## Healthy controls\n\n" + "\n".join(f"- **{k.name}** ({_families(k)}): {k.about}" for k in _controls()),
            "## Rules and their sources\n\n" + "\n".join(_sources()),
            "## Published runs and their sources\n\n" + "\n".join(_published_sources()),
            _ADDING,
        ]
    )


_RUNS_PLOT = """\
The loss of the run with the fault (red), of its fault-free twin (grey) and of the same run under surefoot (blue), one
plot per kind of fault. The dotted line is the onset."""

_INTRODUCTION = """\
Each run trains a small model on a synthetic task whose loss cannot reach zero, on one core, in a second or two. A
fault is planted at a known step, with a known cause, at three strengths; before that step the run is bit-equal to its
fault-free twin. A fault is *harmful* when the bare run ends more than 5 % worse than its twin on the eval set. The
scenario states in advance whether it is, and the benchmark reports scenarios that are not as stated.

- **detected**: harmful runs in which the rule raised an alarm at the onset or later; *steps after onset* is the median
  of the first such alarm. Alarm rules are shown recordings of bare runs; surefoot, which intervenes, is scored by its
  journal of the run it protected. It is given what a loop has at hand: the inputs of each batch, and every 25 steps
  the eval loss. *Cause right*: the first cause it named from the onset on is the planted one.
- **cured**: harmful runs that can be cured and end at most 5 % worse than their twin. Rules that intervene run live;
  *loss / twin's* is the median, *broken* the share whose model is broken at the end, *stopped* the runs that the rule
  itself stopped. *Worse than bare*: runs, harmful or healthy, that end more than 2 % above the same run bare. surefoot
  is given a `step_fn`, so that it can run trials; the row without shows its rules alone. Scenarios with two ranks are
  run bare and under surefoot only.
- **false findings**, **false interventions**: alarms, and updates changed or skipped, per 100 000 healthy steps: twins
  in full, controls from their onset on. *Healthy harmed*: healthy runs that end more than 5 % worse than bare.

Rules are tuned on one set of families and seeds and reported on another:
"""
_INTRODUCTION += "\n".join(
    f"- {split}: {', '.join(f.name for f in FAMILIES.values() if f.split is split)}" for split in Split
)

_ADDING = f"""\
## Adding a scenario

A fault is a function in one of the modules of `benchmarks/zoo/faults/`; a control is one in
`benchmarks/zoo/controls/`. `ZooRun` has a hook for each part of the loop, and a hook must do nothing before `at`:

```python
{inspect.getsource(FAULTS[EXAMPLE].plant)}```

`on` names its families, each with three marks for subtle, clear and brutal: harmful (`!`) or not (`.`).
`python -m benchmarks.zoo.verify bad_batch` trains it in every family, at every strength and seed, beside its twin, and
reports what is not as stated. `{COMMAND}` rewrites this page.
"""


def _controls() -> Sequence[ScenarioKind]:
    return list(CONTROLS.values())


def _families(kind: ScenarioKind) -> str:
    return ", ".join(kind.families)


def _faults() -> str:
    lines = ["| fault | what is planted | cause | families, harmful (!) when " + ", ".join(STRENGTHS) + " |"]
    lines.append("|---|---|---|---|")
    for kind in FAULTS.values():
        on = ", ".join(f"{family} `{marks}`" for family, marks in kind.families.items())
        detect_only = "" if kind.curable else " (detect only)"
        about = " ".join(kind.about.split())
        lines.append(f"| {kind.name} | {about} | {kind.cause}{detect_only} | {on} |")
    return "\n".join(lines)


def _sources() -> list[str]:
    rules: list[Any] = [make() for make in (*ALARM_RULES, *INTERVENTION_RULES)]
    return [f"- {rule.name}: {' '.join((type(rule).__doc__ or '').split())} Source: {rule.source}" for rule in rules]


def _published_sources() -> list[str]:
    return [f"- {t.name}: {t.about} Source: <{t.source}>" for t in PUBLISHED_RUNS]


# -- plots


def _draw_rules(board: Scoreboard, path: Path, *, replace: bool) -> None:
    """Detected faults against false findings, and cured faults against false interventions."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    detected = {n: (f.false_alarms.rate, f.detection.get(ALL, DetectionScore()).share) for n, f in board.alarms.items()}
    cured = {
        n: (f.false_interventions.rate, f.outcomes.get(ALL, OutcomeScore()).share)
        for n, f in board.interventions.items()
    }
    _scatter(left, detected, "false findings per 100 000 healthy steps", "harmful faults detected")
    _scatter(right, cured, "false interventions per 100 000 healthy steps", "harmful faults that end well")
    save_figure(figure, path, force=replace or None, dpi=90)
    plt.close(figure)


def _scatter(axes: Any, points: dict[str, tuple[float, float]], x: str, y: str) -> None:
    for name, (rate, share) in points.items():
        colour = "tab:blue" if name == SUREFOOT else "tab:gray"
        axes.plot(rate, 100 * share, "o", color=colour)
        axes.annotate(name, (rate, 100 * share), xytext=(5, 4), textcoords="offset points", fontsize=8, color=colour)
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(-2, 4e6)
    axes.set_ylim(-4, 104)
    axes.set_xlabel(x)
    axes.set_ylabel(f"{y} (%)")
    axes.grid(alpha=0.3)


def _draw_runs(board: Scoreboard, path: Path, *, replace: bool) -> None:
    """One small plot per kind of fault."""
    plt = _pyplot()
    chosen = _one_of_each(board)
    lines = max(1, math.ceil(len(chosen) / _COLUMNS))
    figure, grid = plt.subplots(lines, _COLUMNS, figsize=(14, 1.9 * lines), layout="constrained", squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, scenario in zip(grid.flat, chosen, strict=False):
        axes.set_axis_on()
        for judge, run, colour, width in (
            (BARE, scenario.twin, "0.6", 0.9),
            (SUREFOOT, scenario, "tab:blue", 2.2),
            (BARE, scenario, "tab:red", 0.7),
        ):
            if (run.id, judge) in board.results:
                axes.plot(*_losses(board, run, judge), color=colour, lw=width)
        axes.axvline(scenario.onset, color="k", lw=0.5, ls=":")
        axes.set_yscale("log")
        axes.tick_params(which="both", labelsize=6)
        axes.set_title(f"{scenario.name}\n{scenario.settings.family}, {scenario.strength}", fontsize=7)
    save_figure(figure, path, force=replace or None, dpi=80)
    plt.close(figure)


def _one_of_each(board: Scoreboard) -> list[Scenario]:
    """The clear form of each kind, or the brutal one where only that is harmful."""
    first: dict[str, Scenario] = {}
    for scenario in sorted(board.scenarios, key=lambda s: (not s.harmful, s.strength == "brutal")):
        if not scenario.healthy and scenario.strength != "subtle":
            first.setdefault(scenario.name, scenario)
    return [first[name] for name in FAULTS if name in first]


def _losses(board: Scoreboard, scenario: Scenario, judge: str) -> tuple[np.ndarray, np.ndarray]:
    scalars = surefoot.read(ZooJob(scenario.id, judge, str(board.folder)).run_dir).scalars
    losses = scalars["loss"].astype(float)
    return scalars["attempt"], np.where(np.isfinite(losses) & (losses > 0), np.minimum(losses, 1e6), np.nan)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt

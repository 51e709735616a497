"""What `surefoot watch` shows in a terminal: one screen from one run, at any size, with or without colour."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from surefoot.journal.pyramid import MAX, MEAN, MIN, NONFINITE, SCALAR_COLUMNS
from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.report.axes import AxisScale
from surefoot.logs.report.terminal_plot import PlotLine, plot_text
from surefoot.logs.report.wording import clean, format_count, format_value
from surefoot.sinks.progress import format_duration
from surefoot.story.incident_block import branch_lines, incident_lines, incident_title
from surefoot.story.incident_story import IncidentStory
from surefoot.story.run_story import RunVerdict
from surefoot.watch.event_tail import EventLine
from surefoot.watch.find_runs import FoundRun
from surefoot.watch.layer_flow import LayerFlow, layer_flow
from surefoot.watch.live_run import LiveRun

SCALES = ("auto", "log", "linear")
PANELS = ("overview", "layers", "events", "runs", "help")
_HEALTH_STYLES: dict[str, str] = {
    RunHealth.HEALTHY: "bold green",
    RunHealth.WARNING: "bold yellow",
    RunHealth.FAILED: "bold red",
    RunVerdict.KILLED: "bold red",
    RunHealth.UNKNOWN: "bold cyan",
}
_LABEL_STYLES = {"finding": "yellow", "cause": "cyan", "trial": "cyan", "action": "bold", "would": "bold",
                 "outcome": "green", "failed": "red"}  # fmt: skip
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_UNCUT = 10_000
"""Columns that no line reaches."""
_CROSS = "\u00d7"
_TWO_PLOTS = 72
"""Columns from which loss and gradient norm stand side by side."""
HELP = (
    ("l", "scale of the plots: auto, log, linear"),
    ("g", "gradient flow: the norm of every layer"),
    ("e", "events and incidents"),
    ("r", "other runs; up and down choose, enter opens"),
    ("o, esc", "back to the overview"),
    ("up, down", "scroll a list; page up and page down too"),
    ("?", "this page"),
    ("q", "quit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenView:
    """What the keys have chosen."""

    panel: str = "overview"
    scale: str = "auto"
    scroll: int = 0
    """First line of a list; for events, counted back from the newest."""
    selected: int = 0
    """In the list of runs."""


def render(
    run: LiveRun, view: ScreenView, runs: Sequence[FoundRun], *, width: int, height: int, unicode: bool
) -> RenderableType:
    """The screen, at most `height` lines."""
    head = [_verdict_line(run, width, unicode), *_number_lines(run, width)]
    room = max(3, height - len(head) - 1)
    panels = {
        "overview": lambda: _overview(run, view, width=width, room=room, unicode=unicode),
        "layers": lambda: _layers(run, view, width=width, room=room, unicode=unicode),
        "events": lambda: _events(run, view, width=width, room=room),
        "runs": lambda: _runs(run, view, runs, width=width, room=room),
        "help": lambda: [Text.assemble((f"  {keys:<10}", "bold"), words) for keys, words in HELP][:room],
    }
    return Group(*head, *panels[view.panel](), _footer(view, width))


def snapshot(run: LiveRun, *, width: int, unicode: bool) -> RenderableType:
    """The overview for an output that is not a terminal: no keys, and all the room it needs."""
    head = [_verdict_line(run, _UNCUT, unicode), *_number_lines(run, width)]
    body = _overview(run, ScreenView(), width=width, room=32, unicode=unicode)
    incidents = [line for incident in run.verdict.incidents[-3:] for line in _incident_lines(incident, _UNCUT)]
    return Group(*head, *body, *incidents)


def _verdict_line(run: LiveRun, width: int, unicode: bool) -> Text:
    verdict = run.verdict
    style = _HEALTH_STYLES.get(verdict.verdict, "bold")
    line = Text.assemble(("● " if unicode else "* ", style), (verdict.verdict.upper(), style), f" {run.name}: ")
    return _cut(line.append(verdict.sentence), width)


def _number_lines(run: LiveRun, width: int) -> list[Text]:
    now = run.numbers
    total = f" of {format_count(now.total_steps)}" if math.isfinite(now.total_steps) else ""
    speed = next(
        (
            f"{value:,.3g} {unit}/s" if value < 1000 else f"{value:,.0f} {unit}/s"
            for value, unit in (
                (now.tokens_per_s, "tokens"),
                (now.samples_per_s, "samples"),
                (now.steps_per_s, "steps"),
            )
            if math.isfinite(value)
        ),
        "",
    )
    memory = decimal(int(now.memory)) if math.isfinite(now.memory) else ""
    facts = [
        ("step", f"{format_count(now.step)}{total}" if now.step >= 0 else "none"),
        ("loss", format_value(now.loss) if now.step >= 0 else ""),
        ("eval", _known(now.eval_loss)),
        ("norm", _known(now.norm)),
        ("lr", _known(now.lr)),
        ("scale", _known(now.loss_scale)),
        ("speed", speed),
        ("memory", memory),
        ("data wait", f"{now.data_wait:.0%}" if now.data_wait >= 0.005 else ""),
        ("device busy", f"{now.utilisation:.0%}" if now.on_accelerator and math.isfinite(now.utilisation) else ""),
        ("left", format_duration(now.seconds_left) if math.isfinite(now.seconds_left) else ""),
    ]
    lines, line = [], Text()
    for name, value in facts:
        if not value:
            continue
        if len(line) + len(name) + len(value) + 3 > width and len(line):
            lines.append(line)
            line = Text()
        line.append(("  " if len(line) else "") + name + " ", "dim").append(value)
    lines.append(line)
    if now.bottleneck:
        lines.append(_cut(Text("waiting for " + now.bottleneck, "yellow"), width))
    return lines


def _known(value: float) -> str:
    return "" if math.isnan(value) else format_value(value)


def _overview(run: LiveRun, view: ScreenView, *, width: int, room: int, unicode: bool) -> list[RenderableType]:
    body: list[RenderableType] = []
    plots_side_by_side = width >= _TWO_PLOTS
    height = max(3, min(12, (room - 9) if plots_side_by_side else (room - 12) // 2))
    if room >= 8:
        cells = (width - 2) // 2 if plots_side_by_side else width - 1
        plots = [
            _plot(run, column, label, view.scale, width=cells, height=height, unicode=unicode)
            for column, label in (("loss", "loss"), ("norm", "gradient norm"))
        ]
        plots = [plot for plot in plots if plot]
        if plots_side_by_side and len(plots) == 2:
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_row(*(Text("\n").join(plot) for plot in plots))
            body.append(table)
            room -= max(len(plot) for plot in plots)
        else:
            for plot in plots:
                body += plot
                room -= len(plot)
    if room >= 5:
        strip = _flow_strip(run, width, unicode)
        body += strip
        room -= len(strip)
    events = [_event_line(line, width) for line in run.lines[-max(0, room) :]] if room > 0 else []
    return [*body, *events]


def _plot(run: LiveRun, column: str, label: str, scale: str, *, width: int, height: int, unicode: bool) -> list[Text]:
    entries = run.scalars.curve([SCALAR_COLUMNS.index(column)], 0, run.scalars.last_attempt, 8 * width)
    stats = entries["stats"][:, 0].astype(np.float64)
    if not np.isfinite(stats[:, MEAN]).any() and column != "loss":
        return []
    # Each bucket as its lowest and its highest value, so that a spike of one step stays.
    bad = np.where(stats[:, NONFINITE] > 0, np.nan, stats[:, MAX])
    values = np.stack([stats[:, MIN], stats[:, MAX], bad], 1)
    attempts = np.repeat(entries["attempt"].astype(np.float64)[:, None], 3, axis=1)
    keep = np.isfinite(values)
    keep[:, 2] = stats[:, NONFINITE] > 0
    line = PlotLine(label, attempts[keep], values[keep], "cyan")
    chosen = _scale(values[np.isfinite(values)], scale)
    lines = plot_text([line], width=width, height=height, unit="attempt", unicode=unicode, scale=chosen)
    for text in lines:
        text.truncate(width)
    return lines


def _scale(values: np.ndarray, wanted: str) -> AxisScale | None:
    """The scale that was asked for; None leaves the choice to the plot."""
    if wanted == "auto" or not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if wanted == "log":
        above = values[values > 0]
        if not len(above):
            return None
        return AxisScale(float(above.min()), max(high, float(above.min()) * 10), "log")
    room = (high - low) or abs(high) * 0.1 or 1.0
    return AxisScale(low, high if high > low else low + room)


def _bar(share: float, unicode: bool) -> str:
    marks = _BARS if unicode else _ASCII_BARS
    return marks[min(len(marks) - 1, max(0, int(share * len(marks))))]


def _flow_strip(run: LiveRun, width: int, unicode: bool) -> list[Text]:
    """One character per layer, or per few of them, from input to output."""
    flow = layer_flow(run)
    if flow is None:
        return []
    groups = np.array_split(np.arange(len(flow.names)), min(len(flow.names), max(1, width - 2)))
    line = Text()
    for group in groups:
        if flow.nonfinite[group].any():
            line.append(_CROSS if unicode else "x", "red")
        elif np.isfinite(flow.norms[group]).any():
            line.append(_bar(float(np.nanmax(flow.shares[group])), unicode), "green")
        else:
            line.append(" ")
    title = f"gradient flow by layer, {format_value(flow.low)} to {format_value(flow.high)}, log scale (g: all layers)"
    return [_cut(Text(title, "dim"), width), line]


def _layers(run: LiveRun, view: ScreenView, *, width: int, room: int, unicode: bool) -> list[RenderableType]:
    flow = layer_flow(run)
    if flow is None:
        return [Text("no per-layer numbers in this run", "dim")]
    name_width = max(12, min(max(len(name) for name in flow.names), width - 44))
    bar_width = max(4, min(40, width - name_width - 34))
    title = f"{'layer':<{name_width}}  {'norm':>9}  {'highest':>9}  {'NaN/Inf':>7}  log scale"
    first = min(view.scroll, max(0, len(flow.names) - (room - 1)))
    lines: list[RenderableType] = [_cut(Text(title, "dim"), width)]
    for at in range(first, min(len(flow.names), first + room - 1)):
        lines.append(_layer_line(flow, at, name_width, bar_width, unicode))
    return lines


def _layer_line(flow: LayerFlow, at: int, name_width: int, bar_width: int, unicode: bool) -> Text:
    name = flow.names[at]
    if len(name) > name_width:
        name = "..." + name[-(name_width - 3) :]
    share = flow.shares[at]
    filled = 0 if math.isnan(share) else max(1, round(float(share) * bar_width))
    count = int(flow.nonfinite_ever[at])
    norm = "NaN/Inf" if flow.nonfinite[at] else _known(float(flow.norms[at])) or "none"
    line = Text(f"{name:<{name_width}}  {norm:>9}  {_known(float(flow.highest[at])):>9}  ")
    line.append(f"{count or '':>7}", "red").append("  ")
    return line.append(("█" if unicode else "#") * filled, "red" if flow.nonfinite[at] else "green")


def _events(run: LiveRun, view: ScreenView, *, width: int, room: int) -> list[RenderableType]:
    incident_lines = [line for incident in run.verdict.incidents for line in _incident_lines(incident, width)]
    all_lines = [*incident_lines, *(_event_line(line, width) for line in run.lines)]
    if not all_lines:
        return [Text("no events yet", "dim")]
    end = max(min(room, len(all_lines)), len(all_lines) - view.scroll)
    return list(all_lines[max(0, end - room) : end])


def _incident_lines(incident: IncidentStory, width: int) -> list[Text]:
    lines = [Text(f"incident at {clean(incident_title(incident))}", "bold")]
    parts = list(incident_lines(incident, ""))
    at = next((k for k, (label, _) in enumerate(parts) if label == "result"), len(parts))
    parts[at:at] = (("tried", line) for line in branch_lines(incident))
    for label, text in parts:
        style = ("green" if incident.helped else "red" if incident.helped is False else "") if label == "result" else ""
        lines.append(Text(f"  {label + ':':10}{clean(text)}", style))
    return [_cut(line, width) for line in lines]


def _event_line(line: EventLine, width: int) -> Text:
    text = Text(f"{line.step:>8,}  ", "dim")
    text.append(f"{line.label:<8} ", _LABEL_STYLES.get(line.label, "dim"))
    return _cut(text.append(line.text), width)


def _runs(run: LiveRun, view: ScreenView, runs: Sequence[FoundRun], *, width: int, room: int) -> list[RenderableType]:
    lines: list[RenderableType] = []
    first = max(0, view.selected - room + 1)
    for at in range(first, min(len(runs), first + room)):
        age = max(0.0, time.time() - runs[at].changed)
        mark = ">" if at == view.selected else " "
        shown = "shown" if runs[at].path == run.path else ""
        head = f"{mark} {shown:<5}  {format_duration(age) + ' ago':>16}  "
        path, room_for_path = str(runs[at].path), max(12, width - len(head))
        if len(path) > room_for_path:  # its end tells runs apart
            path = "..." + path[-(room_for_path - 3) :]
        lines.append(_cut(Text(head + path, "bold" if at == view.selected else ""), width))
    return lines


def _footer(view: ScreenView, width: int) -> Text:
    words = f"q quit  l scale ({view.scale})  g layers  e events  r runs  o overview  ? help"
    return _cut(Text(words if width >= len(words) else "q quit  ? help", "reverse"), width)


def _cut(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(max(8, width), overflow="ellipsis")
    return text

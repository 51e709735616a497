"""Draws the curves of a run, and where the trouble began, into a file with matplotlib."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.journal.output_files import save_figure
from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth, UnreadableInput
from surefoot.logs.report.axes import clip_finite
from surefoot.logs.report.panels import Panel, onset_of, run_panels, step_limits
from surefoot.logs.report.wording import clean, format_count, format_value
from surefoot.logs.run_curves import Series

SUFFIXES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")
INK, FAINT, GRID = "#1f2933", "#66727f", "#e4e8ec"
LINES = ("#2563eb", "#d97706", "#059669", "#9333ea")
HEALTH_COLOURS = {
    RunHealth.HEALTHY: "#15803d",
    RunHealth.WARNING: "#b45309",
    RunHealth.FAILED: "#b91c1c",
    RunHealth.UNKNOWN: "#0e7490",
}
_ONSET_COLOUR = "#dc2626"


@dataclass(frozen=True, slots=True)
class PictureTitle:
    """Title, onset label and unit of a picture."""

    title: str
    colour: str
    onset: float | None = None
    onset_label: str = "began"
    unit: str = "step"


def draw_picture(diagnosis: LogDiagnosis, path: Path, *, inputs: Sequence[str] = (), force: bool = False) -> None:
    """Draw one run into a file; the suffix selects the format."""
    panels = run_panels(diagnosis.curves) if diagnosis.curves is not None else []
    title = f"{diagnosis.verdict.upper()}: {clean(diagnosis.sentence)}"
    about = PictureTitle(
        title, colour=HEALTH_COLOURS[diagnosis.verdict], onset=onset_of(diagnosis), unit=_unit(diagnosis)
    )
    save_picture(panels, path, about, inputs=inputs, force=force)


def check_can_draw(path: Path) -> None:
    """Raise if no picture can be drawn; called before a long log is read."""
    if path.suffix.lower() not in SUFFIXES:
        raise UnreadableInput(f"--plot {path}: the file name must end in {', '.join(SUFFIXES[:3])}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UnreadableInput(
            "--plot needs matplotlib, which is not installed: pip install 'surefoot[plots]'."
            " Without it, use --html, which has its own plot, or the plot in the terminal"
        ) from None


def _unit(diagnosis: LogDiagnosis) -> str:
    return diagnosis.curves.unit if diagnosis.curves is not None else "step"


def save_picture(
    panels: Sequence[Panel], path: Path, about: PictureTitle, *, inputs: Sequence[str] = (), force: bool = False
) -> None:
    """Draw panels above one another into a file."""
    check_can_draw(path)
    from matplotlib.figure import Figure

    if not panels:
        raise UnreadableInput(f"--plot {path}: nothing to draw, as the log contains no numbers over steps")
    heights = [2.6, *([1.2] * (len(panels) - 1))]
    picture = Figure(figsize=(9, 1.3 + sum(heights)), layout="constrained", facecolor="white")
    title = textwrap.fill(about.title, 88)
    picture.suptitle(title, x=0.012, ha="left", fontsize=11.5, fontweight="bold", color=about.colour, parse_math=False)
    axes = picture.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, axis in zip(panels, axes, strict=True):
        _panel(axis, panel, edges=step_limits(panels), onset=about.onset)
    picture.align_ylabels(axes)
    axes[0].set_xlim(*_with_margin(step_limits(panels)))
    axes[-1].set_xlabel(about.unit, color=FAINT)
    if about.onset is not None:
        _label_onset(axes[0], about.onset, about.onset_label)
    _write(picture, path, inputs=inputs, force=force)


def _with_margin(edges: tuple[float, float]) -> tuple[float, float]:
    margin = (edges[1] - edges[0]) * 0.01
    return edges[0] - margin, edges[1] + margin


def _write(picture: Any, path: Path, *, inputs: Sequence[str], force: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters missing in the font are drawn as boxes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_figure(picture, path, inputs=inputs, force=force, dpi=150)
        except OSError as error:
            raise UnreadableInput(f"--plot {path} cannot be written: {error.strerror or error}") from None


def _panel(axis: Any, panel: Panel, *, edges: tuple[float, float], onset: float | None) -> None:
    _style_frame(axis)
    if panel.scale.kind == "log":
        axis.set_yscale("log", nonpositive="clip")
    elif panel.scale.kind == "both":
        axis.set_yscale("symlog", linthresh=1.0)
    for ink, series in zip(panel.colours, panel.series, strict=True):
        _line(axis, series, LINES[ink % len(LINES)])
    for first, last in panel.nonfinite:
        axis.axvspan(first, last, color=_ONSET_COLOUR, alpha=0.12, linewidth=0 if last > first else 1)
    middle = panel.nonfinite_label_at(edges) if panel.title == "loss" else None
    if middle is not None:
        where = axis.get_xaxis_transform()
        axis.text(
            middle, 0.5, panel.nonfinite_label, transform=where, color=_ONSET_COLOUR, ha="center", parse_math=False
        )
    if onset is not None:
        axis.axvline(onset, color=_ONSET_COLOUR, linewidth=1.1, linestyle=(0, (4, 3)))
    _limits(axis, panel)
    axis.set_ylabel(panel.title, color=INK)
    if [series.name for series in panel.series] != [panel.title]:
        legend = axis.legend(loc="best", frameon=True, framealpha=0.8, edgecolor="none", fontsize=8.5, labelcolor=INK)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _style_frame(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(GRID)
    axis.tick_params(colors=FAINT, labelsize=8.5)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.xaxis.set_major_formatter(lambda value, _: format_count(value))


def _limits(axis: Any, panel: Panel) -> None:
    """Margins above and below; a scale that a single tiny value would stretch is cut at its floor."""
    low, high = panel.scale.low, panel.scale.high
    if panel.scale.kind == "log":
        axis.set_ylim(low / 1.3, high * 1.5)
    elif panel.scale.kind == "linear":
        margin = (high - low) * 0.06
        axis.set_ylim(low - margin, high + margin)
        axis.yaxis.set_major_formatter(lambda value, _: format_value(value))


def _line(axis: Any, series: Series, colour: str) -> None:
    values = clip_finite(series.values)
    marker = "o" if len(values) <= 60 else ""
    axis.plot(
        clip_finite(series.steps),
        values,
        color=colour,
        linewidth=1.2,
        marker=marker,
        markersize=3,
        label=series.name or "loss",
    )


def _label_onset(axis: Any, onset: float, word: str) -> None:
    low, high = axis.get_xlim()
    left = onset > (low + high) / 2
    axis.annotate(
        f"{word} at {format_count(onset)}",
        (onset, 1.0),
        xycoords=axis.get_xaxis_transform(),
        xytext=(-5 if left else 5, -2),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        fontsize=9,
        color=_ONSET_COLOUR,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )

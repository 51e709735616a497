"""Wording of a diagnosis, shared by the terminal page, the plots and the HTML page."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from surefoot.logs.log_diagnosis import LogDiagnosis, RankedCause, RunHealth
from surefoot.records import Pattern
from surefoot.story.cause_phrases import CAUSE_PHRASES

PATTERN_PHRASES: dict[Pattern, str] = {
    Pattern.NONFINITE: "the loss turned NaN or Inf",
    Pattern.JUMP: "a jump that did not come back",
    Pattern.EXPONENTIAL: "growth that got faster and faster",
    Pattern.OSCILLATING: "swings that grew wider",
    Pattern.PLATEAU: "no learning",
    Pattern.COLLAPSE_TO_ZERO: "a loss of exactly zero",
    Pattern.RECOVERED_SPIKE: "a spike that came back",
    Pattern.OVERFIT: "overfitting",
    Pattern.OVERFLOW_SKIPS: "skipped steps",
}

COLOURS = {RunHealth.HEALTHY: "green", RunHealth.WARNING: "yellow", RunHealth.FAILED: "red", RunHealth.UNKNOWN: "cyan"}


def clean(text: object, max_chars: int = 600) -> str:
    """Text from a log, safe for a terminal: control characters, which could steer it, are removed."""
    cleaned = " ".join(str(text)[: max_chars * 2].split())
    cleaned = "".join(
        character
        for character in cleaned
        if not unicodedata.category(character).startswith("C") or character == "\u200d"
    )
    return cleaned if len(cleaned) <= max_chars else cleaned[: max_chars - 3] + "..."


def onset_sentence(diagnosis: LogDiagnosis) -> str:
    """When the trouble began and how far into the run that was; empty without an onset."""
    if diagnosis.onset_step is None:
        return ""
    unit = diagnosis.curves.unit if diagnosis.curves is not None else "step"
    sentence = f"Began at {unit} {format_count(diagnosis.onset_step)}"
    last = diagnosis.last_step
    if last is None or last < diagnosis.onset_step:
        return sentence + "."
    sentence += f" of {format_count(last)}"
    first = _first_step(diagnosis)
    if last > first:
        share = min(1.0, max(0.0, (diagnosis.onset_step - first) / (last - first)))
        sentence += f", {share:.0%} into the run".replace("%", " %") if share > 0 else ", right at the start"
    return sentence + "."


def _first_step(diagnosis: LogDiagnosis) -> float:
    if diagnosis.curves is None or not len(diagnosis.curves.loss):
        return 0.0
    return min(float(diagnosis.curves.loss.steps[0]), 0.0)


def cause_phrase(cause: RankedCause) -> str:
    return f"{CAUSE_PHRASES.get(cause.cause, str(cause.cause))} ({cause.confidence:.0%})".replace("%", " %")


def ordered_advice(causes: Iterable[RankedCause], max_lines: int) -> list[str]:
    """What to do, in order: all advice of the first cause, then what the others add."""
    lines: list[str] = []
    for cause in causes:
        for line in cause.advice:
            if (line := clean(line)) not in lines:
                lines.append(line)
    return lines[:max_lines]


def source_parts(diagnosis: LogDiagnosis) -> list[str]:
    """Where the numbers came from: path, format, points, columns, what was skipped."""
    source = diagnosis.source
    parts = [clean(source.get("path", ""), 200), clean(source.get("format", ""))]
    points = source.get("points")
    if isinstance(points, int | float):
        parts.append(f"{format_count(points)} points")
    columns = source.get("columns")
    if isinstance(columns, dict) and columns:
        parts.append("columns: " + ", ".join(_column(role, name) for role, name in columns.items()))
    skipped = source.get("skipped")
    if isinstance(skipped, dict) and skipped:
        parts.append("skipped: " + ", ".join(f"{format_count(times)} {clean(why)}" for why, times in skipped.items()))
    return [part for part in parts if part]


def _column(role: Any, name: Any) -> str:
    role, name = clean(role, 60), clean(name, 60)
    return name if role == name else f"{role} = {name}"


def join_words(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def format_value(value: float) -> str:
    """A number in at most about eight characters."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    size = abs(value)
    if size != 0 and (size >= 1e6 or size < 1e-3):
        mantissa, _, power = (f"{value:.2e}" if 1e-99 < size < 1e99 else f"{value:.0e}").partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:,.0f}" if size >= 10_000 or value == int(value) else f"{value:,.4g}".rstrip()


def format_count(value: float) -> str:
    """A step or count: 12,000; a fractional epoch keeps its decimals."""
    if not math.isfinite(value):
        return format_value(value)
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"

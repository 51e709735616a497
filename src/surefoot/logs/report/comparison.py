"""Compares two logs: where they diverge, which ends lower, and which settings differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from surefoot.journal.strict_json import plain
from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth
from surefoot.logs.report.axes import MAX_DRAWN, Floats, thin_points
from surefoot.logs.report.wording import clean, format_count, format_value, join_words
from surefoot.logs.run_curves import RunCurves, Series

MAX_GRID = 4000
"""Steps at which the two are compared."""
MIN_NOISE_RATIO = 4.0
"""Losses differ if they are this many times their noise apart."""

NOT_SETTINGS = frozenset(
    {"global_step", "epoch", "best_metric", "best_model_checkpoint", "best_global_step", "total_flos"}
    | {"num_input_tokens_seen", "train_runtime", "train_loss"}
)
"""Entries among a log's settings that are results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogComparison:
    """The comparison of two logs."""

    a: LogDiagnosis
    b: LogDiagnosis
    sentence: str
    diverged_at: float | None = None
    """The first step from which the losses differ by more than their noise."""
    compared_at: float | None = None
    """The last step that both reached without failing."""
    losses: tuple[float, float] | None = None
    """The smoothed loss of each at that step."""
    rows: tuple[tuple[str, str, str], ...] = ()
    """Rows of name, value of A, value of B."""
    settings: tuple[tuple[str, str, str], ...] = ()
    """Settings and columns that differ."""
    notes: tuple[str, ...] = ()

    @property
    def is_trouble(self) -> bool:
        return self.a.is_trouble or self.b.is_trouble

    def as_json(self) -> dict[str, Any]:
        fields = {
            "sentence": self.sentence,
            "parted_step": self.diverged_at,
            "compared_at_step": self.compared_at,
            "losses": None if self.losses is None else {"a": self.losses[0], "b": self.losses[1]},
            "settings": [{"name": name, "a": a, "b": b} for name, a, b in self.settings],
            "notes": list(self.notes),
        }
        return plain(fields) | {"a": self.a.as_json(), "b": self.b.as_json()}


def compare_logs(a: LogDiagnosis, b: LogDiagnosis) -> LogComparison:
    """Compare two diagnoses, step by step if both have a loss."""
    rows, settings = tuple(_comparison_rows(a, b)), tuple(_differing_settings(a, b))
    pair = _align_losses(a.curves, b.curves, before=_first_failure(a, b))
    notes = _notes(a, b)
    if isinstance(pair, str):
        sentence = f"{pair}; {_verdict_phrase(a, b)}."
        return LogComparison(a=a, b=b, sentence=sentence, rows=rows, settings=settings, notes=notes)
    parted = pair.divergence_step()
    losses = pair.final_losses()
    rows = (*rows, (f"loss at {format_count(pair.steps[-1])}", format_value(losses[0]), format_value(losses[1])))
    return LogComparison(
        a=a,
        b=b,
        sentence=_sentence(a, b, pair, losses, parted),
        diverged_at=parted,
        compared_at=float(pair.steps[-1]),
        losses=losses,
        rows=rows,
        settings=settings,
        notes=notes,
    )


# -- numbers


@dataclass(frozen=True, slots=True)
class _SmoothedPair:
    """Two losses, smoothed, at the same steps."""

    steps: Floats
    a: Floats
    b: Floats
    noise: float
    """How far apart two equal runs would be."""

    def divergence_step(self) -> float | None:
        """The step from which they stay apart for a while, or to the end."""
        apart = np.abs(self.a - self.b) > MIN_NOISE_RATIO * self.noise
        lasting = max(2, len(apart) // 50)
        run = 0
        for index in range(len(apart)):
            run = run + 1 if apart[index] else 0
            if run >= lasting:
                return float(self.steps[index - run + 1])
        return float(self.steps[len(apart) - run]) if run else None

    def final_losses(self) -> tuple[float, float]:
        last = max(1, len(self.steps) // 50)
        return float(np.median(self.a[-last:])), float(np.median(self.b[-last:]))


def _first_failure(a: LogDiagnosis, b: LogDiagnosis) -> float:
    """The first failure of either: later losses are not compared."""
    return min(
        (
            float(diagnosis.onset_step)
            for diagnosis in (a, b)
            if diagnosis.verdict is RunHealth.FAILED and diagnosis.onset_step
        ),
        default=np.inf,
    )


def _align_losses(a: RunCurves | None, b: RunCurves | None, *, before: float) -> _SmoothedPair | str:
    """Both losses on one grid, or why that is impossible."""
    if a is None or b is None or not len(a.loss) or not len(b.loss):
        which = join_words([name for name, side in (("A", a), ("B", b)) if side is None or not len(side.loss)])
        return f"{which} {'has' if len(which) == 1 else 'have'} no loss to compare"
    if a.unit != b.unit:
        return f"A counts in {a.unit}s and B in {b.unit}s, so they cannot be held against each other"
    first, second = _sort_by_step(a.loss), _sort_by_step(b.loss)
    if not len(first) or not len(second):
        return "there is not one finite loss in A" if not len(first) else "there is not one finite loss in B"
    low, high = max(first.steps[0], second.steps[0]), min(first.steps[-1], second.steps[-1])
    high = before if low < before < high else high
    if low > high:
        return f"A and B have no {a.unit} in common"
    steps = np.unique(
        np.concatenate([side.steps[(side.steps >= low) & (side.steps <= high)] for side in (first, second)])
    )
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_GRID)).astype(int))]
    smooth = [_smooth(side) for side in (first, second)]
    levels = [np.interp(steps, side.steps, values) for side, (values, _) in zip((first, second), smooth, strict=True)]
    floor = 1e-3 * float(np.median(np.abs(levels[0])))
    noise = float(np.hypot(smooth[0][1], smooth[1][1]))
    return _SmoothedPair(steps, levels[0], levels[1], max(noise, floor / MIN_NOISE_RATIO))


def _sort_by_step(series: Series) -> Series:
    """Finite values in order of their steps; the last one if a step was logged twice."""
    fine = np.isfinite(series.values) & np.isfinite(series.steps)
    steps, values = thin_points(np.clip(series.steps[fine], -MAX_DRAWN, MAX_DRAWN), series.values[fine], 1 << 18)
    unique, index = np.unique(steps[::-1], return_index=True)
    return Series(series.name, unique, np.clip(values[::-1][index], -MAX_DRAWN, MAX_DRAWN))


def _smooth(series: Series) -> tuple[Floats, float]:
    """A running median, and its standard error."""
    window = min(101, max(1, len(series) // 40)) | 1
    if window < 3:
        noise = np.abs(np.diff(series.values, 2)) if len(series) > 2 else np.zeros(1)
        return series.values, 1.4826 * float(np.median(noise)) / np.sqrt(6)
    padded = np.pad(series.values, window // 2, mode="edge")
    smooth = np.empty(len(series))
    for start in range(0, len(series), 1 << 14):
        piece = padded[start : start + (1 << 14) + window - 1]
        smooth[start : start + (1 << 14)] = np.median(np.lib.stride_tricks.sliding_window_view(piece, window), axis=1)
    off = np.abs(series.values - smooth)
    return smooth, 1.4826 * float(np.median(off)) * 1.25 / np.sqrt(window)


# -- words


def _sentence(
    a: LogDiagnosis, b: LogDiagnosis, pair: _SmoothedPair, losses: tuple[float, float], parted: float | None
) -> str:
    ahead, other = ("A", "B") if losses[0] < losses[1] else ("B", "A")
    low, high = min(losses), max(losses)
    unit = a.curves.unit if a.curves is not None else "step"
    where = f"at {unit} {format_count(pair.steps[-1])} ({format_value(losses[0])} and {format_value(losses[1])})"
    if abs(losses[0] - losses[1]) <= MIN_NOISE_RATIO * pair.noise:
        sentence = f"A and B are level {where}"
    elif low > 0:
        share = (high - low) / high * 100
        sentence = (
            f"{ahead} is {share:.2g} % lower than {other} {where}" if share < 99.5 else f"{ahead} is far lower {where}"
        )
    else:
        sentence = f"{ahead} is lower than {other} by {format_value(high - low)} {where}"
    if parted is not None:
        sentence += f"; they part at {unit} {format_count(parted)}"
    wrong = [
        _failure_phrase(name, diagnosis)
        for name, diagnosis in (("A", a), ("B", b))
        if diagnosis.verdict is RunHealth.FAILED
    ]
    return "; ".join([sentence, *wrong]) + "."


def _failure_phrase(name: str, diagnosis: LogDiagnosis) -> str:
    return f"{name} failed" + ("" if diagnosis.onset_step is None else f" at {format_count(diagnosis.onset_step)}")


def _verdict_phrase(a: LogDiagnosis, b: LogDiagnosis) -> str:
    return f"A is {a.verdict}, B is {b.verdict}" if a.verdict != b.verdict else f"both are {a.verdict}"


def _notes(a: LogDiagnosis, b: LogDiagnosis) -> tuple[str, ...]:
    return tuple(f"{name}: {clean(note)}" for name, diagnosis in (("A", a), ("B", b)) for note in diagnosis.notes)


def _comparison_rows(a: LogDiagnosis, b: LogDiagnosis) -> Iterator[tuple[str, str, str]]:
    yield "log", clean(a.source.get("path", ""), 200), clean(b.source.get("path", ""), 200)
    yield "verdict", str(a.verdict), str(b.verdict)
    if a.onset_step is not None or b.onset_step is not None:
        yield "trouble from", _step_or_dash(a.onset_step), _step_or_dash(b.onset_step)
    yield "last step", _step_or_dash(a.last_step), _step_or_dash(b.last_step)
    for name, role, reduce in (
        ("lowest loss", "loss", np.min),
        ("lowest evaluation loss", "eval_loss", np.min),
        ("largest gradient norm", "grad_norm", np.max),
        ("peak learning rate", "lr", np.max),
        ("speed", "speed", np.median),
        ("time a step", "seconds", np.median),
    ):
        both = [_finite_values(diagnosis.curves, role) for diagnosis in (a, b)]
        if any(len(values) for values in both):
            left, right = (format_value(float(reduce(values))) if len(values) else "-" for values in both)
            yield name, left, right


def _finite_values(curves: RunCurves | None, role: str) -> Floats:
    """The finite values of a curve."""
    if curves is None:
        return np.empty(0)
    series = curves.others.get(role) or getattr(curves, role, None)
    return series.values[np.isfinite(series.values)] if isinstance(series, Series) else np.empty(0)


def _step_or_dash(step: int | None) -> str:
    return "-" if step is None else format_count(step)


def _differing_settings(a: LogDiagnosis, b: LogDiagnosis) -> Iterator[tuple[str, str, str]]:
    """Settings and columns that differ."""
    for kind, prefix in (("facts", ""), ("columns", "column for ")):
        first, second = (diagnosis.source.get(kind) for diagnosis in (a, b))
        first = first if isinstance(first, Mapping) else {}
        second = second if isinstance(second, Mapping) else {}
        for name in sorted({*first, *second} - NOT_SETTINGS, key=str):
            left, right = (_value(side.get(name)) for side in (first, second))
            if left != right:
                yield prefix + clean(name, 60), left, right


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return format_value(value) if isinstance(value, float) else clean(value, 60)

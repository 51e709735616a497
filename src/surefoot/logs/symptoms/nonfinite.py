"""A loss that becomes NaN or infinite and stays so."""

from __future__ import annotations

import numpy as np

from surefoot.judge.loss_shape import shape
from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.run_curves import Series
from surefoot.logs.symptoms.symptom import RunView, Symptom, format_number, lr_raised, values_before
from surefoot.records import Cause, Pattern

RECENT_SHARE = 0.1
"""A NaN in the last share of the run still counts as present."""
MIN_REPEATED, MIN_RECENT_SHARE = 3, 0.05
"""Repeated NaNs that are this share of the recent values are no accident; each of fewer was one update."""
FIRST_EVALS = 3
"""Evaluations of a model that has learnt nothing yet may be infinite."""
MAX_NANS_AFTER_SHAPE = 3
"""With at most this many NaNs at the end, the pattern is that of the curve before them."""


def find_nonfinite(view: RunView) -> Symptom | None:
    curves = view.curves
    for series, held_out in ((curves.loss, False), (curves.eval_loss, True)):
        onset = nonfinite_onset(series)
        if onset is not None:
            return _eval_symptom(view, series, onset) if held_out else _training_symptom(view, series, onset)
    return _recovered(view, curves.loss, "loss", 0) or _recovered(
        view, curves.eval_loss, "evaluation loss", FIRST_EVALS
    )


def _recovered(view: RunView, series: Series, what: str, first: int) -> Symptom | None:
    bad = np.flatnonzero(~np.isfinite(series.values))
    if not (bad >= first).any():
        return None
    step = float(series.steps[bad[0]])
    last = view.at_step(float(series.steps[bad[-1]]))
    return Symptom(
        verdict=RunHealth.WARNING,
        pattern=Pattern.RECOVERED_SPIKE,
        sentence=f"The {what} was not finite at {view.at_step(step)}, and came back.",
        onset=step,
        causes=((Cause.BAD_BATCH, 0.4), (Cause.PRECISION_OVERFLOW, 0.35), (Cause.LOG_OF_ZERO, 0.2)),
        evidence=(f"{len(bad):,} of {len(series):,} logged values are not finite, the last at {last}",),
    )


def nonfinite_onset(series: Series) -> int | None:
    """The index from which values stay non-finite; None if they are finite or recovered."""
    bad = ~np.isfinite(series.values)
    count = len(bad)
    if not bad.any():
        return None
    if bad[-1]:
        good = np.flatnonzero(~bad)
        return int(good[-1]) + 1 if len(good) else 0
    recent = bad[-max(1, int(RECENT_SHARE * count)) :]
    if bad.sum() >= MIN_REPEATED and recent.mean() > MIN_RECENT_SHARE:
        return int(np.flatnonzero(bad)[0])
    return None


def _training_symptom(view: RunView, series: Series, onset: int) -> Symptom:
    step = float(series.steps[onset])
    after = series.values[onset:]
    bad = int((~np.isfinite(after)).sum())
    kind = "infinite" if np.isinf(after[0]) else "NaN"
    if onset == 0:
        subject = "every loss" if bad == len(series) else "the loss"
        return Symptom(
            verdict=RunHealth.FAILED,
            pattern=Pattern.NONFINITE,
            sentence=f"Nothing was learnt: {subject} is {kind} from the first one logged.",
            onset=step,
            causes=_causes_at_start(view),
            evidence=(f"{bad:,} of {len(series):,} logged losses are not finite, from {view.at_step(step)} on",),
        )
    last = float(series.values[onset - 1])
    pattern = shape([float(value) for value in series.values[max(0, onset - 40) : onset + 1]])
    if pattern is Pattern.NONE or not _ends_at_peak(series, onset):
        pattern = Pattern.NONFINITE
    began = _trouble_index(series, onset, pattern)
    raised, words = lr_raised(view, float(series.steps[began]))
    evidence = [f"the loss was {format_number(last)} at {view.at_step(float(series.steps[onset - 1]))}, then {kind}"]
    if len(after) > 1:
        evidence.append(f"{bad:,} of the {len(after):,} losses from there on are not finite: the run went on in vain")
    evidence += [*words, *_norm_evidence(view, step)]
    return Symptom(
        verdict=RunHealth.FAILED,
        pattern=pattern if len(after) <= MAX_NANS_AFTER_SHAPE else Pattern.NONFINITE,
        sentence=f"The run died at {view.at_step(step)}: the loss turned {kind}{_LED_BY[pattern]}.",
        onset=float(series.steps[began]),
        causes=raised or _causes(view, step, pattern),
        evidence=tuple(evidence),
    )


def _ends_at_peak(series: Series, onset: int) -> bool:
    """Whether the last value before the NaN is the highest around: the blow-up led there and was not over."""
    around = series.values[max(0, onset - 24) : onset]
    return bool(around[-1] >= 0.5 * np.nanmax(around))


def _trouble_index(series: Series, onset: int, pattern: Pattern) -> int:
    """Where the trouble began that ended in NaN."""
    if pattern is Pattern.NONFINITE:
        return onset
    first = max(0, onset - 24)
    around = series.values[first:onset]
    low = first + int(np.nanargmin(around))
    if pattern is not Pattern.JUMP:
        return min(low + 1, onset - 1)
    moves = np.diff(series.values[low:onset])
    known = ~np.isnan(moves)  # the difference of two infinities is NaN
    return low + 1 + int(np.argmax(np.where(known, moves, -np.inf))) if known.any() else onset - 1


_LED_BY = {
    Pattern.NONFINITE: "",
    Pattern.JUMP: " after a jump",
    Pattern.EXPONENTIAL: " after it had grown faster and faster",
    Pattern.OSCILLATING: " after swings that widened",
}


def _eval_symptom(view: RunView, series: Series, onset: int) -> Symptom:
    step = float(series.steps[onset])
    bad = int((~np.isfinite(series.values[onset:])).sum())
    whole = bad == len(series)
    when = "every time it was measured" if whole else f"from {view.at_step(step)} on"
    return Symptom(
        verdict=RunHealth.FAILED,
        pattern=Pattern.NONFINITE,
        sentence=f"The evaluation loss is not finite {when}, although the training loss is.",
        onset=step,
        causes=((Cause.PRECISION_OVERFLOW, 0.4), (Cause.LABELS, 0.35), (Cause.LOG_OF_ZERO, 0.25)),
        evidence=(f"{bad:,} of {len(series):,} evaluations are not finite", *_norm_evidence(view, step)),
        advice=(
            "Evaluate one batch by hand in float32: a batch in which every label is masked averages over nothing.",
            "Check padding and masks of the evaluation data, and the precision evaluation runs in.",
        ),
    )


def _causes_at_start(view: RunView) -> tuple[tuple[Cause, float], ...]:
    if view.float16:
        return (Cause.PRECISION_OVERFLOW, 0.5), (Cause.LOG_OF_ZERO, 0.3), (Cause.INITIALISATION, 0.2)
    return (
        (Cause.LOG_OF_ZERO, 0.35),
        (Cause.INPUT_SCALE, 0.25),
        (Cause.INITIALISATION, 0.2),
        (Cause.PRECISION_OVERFLOW, 0.2),
    )


def _norm_growth(view: RunView, step: float) -> float:
    """The growth of the gradient norm over the last values before a step."""
    values = values_before(view.curves.grad_norm, step, 12)
    values = values[values > 0]
    if len(values) < 4:
        return 1.0
    return float(values[-2:].max() / np.median(values[:-2]))


def _norm_evidence(view: RunView, step: float) -> list[str]:
    grew = _norm_growth(view, step)
    if grew < 3:
        return []
    values = values_before(view.curves.grad_norm, step, 12)
    return [f"the gradient norm had grown {grew:.3g}-fold just before, to {format_number(float(values[-2:].max()))}"]


def _causes(view: RunView, step: float, pattern: Pattern) -> tuple[tuple[Cause, float], ...]:
    if pattern is Pattern.EXPONENTIAL:
        return (Cause.LEARNING_RATE, 0.6), (Cause.ACCUMULATION, 0.15), (Cause.MOMENTUM, 0.1)
    if pattern is Pattern.OSCILLATING:
        return (Cause.LEARNING_RATE, 0.4), (Cause.OPTIMIZER_STATE, 0.3), (Cause.SCHEDULE, 0.2)
    if _norm_growth(view, step) >= 5:
        return (Cause.EXPLODING_GRADIENT, 0.45), (Cause.LEARNING_RATE, 0.4), (Cause.BAD_BATCH, 0.15)
    if view.float16:
        return (Cause.PRECISION_OVERFLOW, 0.6), (Cause.LEARNING_RATE, 0.2), (Cause.BAD_BATCH, 0.2)
    if pattern is Pattern.JUMP:
        return (Cause.BAD_BATCH, 0.45), (Cause.PRECISION_OVERFLOW, 0.3), (Cause.LEARNING_RATE, 0.2)
    return (
        (Cause.LOG_OF_ZERO, 0.35),
        (Cause.BAD_BATCH, 0.3),
        (Cause.PRECISION_OVERFLOW, 0.2),
        (Cause.LEARNING_RATE, 0.15),
    )

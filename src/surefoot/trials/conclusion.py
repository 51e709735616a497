"""What the branches of a trial mean: whether the run was harmed, by what kind of thing, and which branch to continue."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from surefoot.records import Cause, StepMetrics
from surefoot.trials.branches import BranchId, BranchResult, gain, is_better

LOSS_TOLERANCE = 0.03
"""Relative difference of a loss from its replay that rounding explains."""
NORM_TOLERANCE = 0.15
"""The same for gradient norms, which scatter more."""
NOISE_FACTOR = 5.0
"""Differences beyond this many usual ones before the onset count as a deviation."""
OPTIMIZER_HARM = 0.1
"""The optimizer state is damaged when steps with it end this fraction worse than with the one of the snapshot."""

DATA_CAUSES = frozenset(
    {
        Cause.BAD_BATCH,
        Cause.LABELS,
        Cause.INPUT_SCALE,
        Cause.DRIFT,
        Cause.LOG_OF_ZERO,
        Cause.ZERO_VARIANCE,
        Cause.ATTENTION_MASK,
    }
)
"""Causes that lie in what a batch does in the model."""
WEIGHT_CAUSES = frozenset(
    {Cause.WEIGHTS_DAMAGED, Cause.DEAD_UNITS, Cause.VANISHING_GRADIENT, Cause.LOGIT_GROWTH, Cause.TRANSIENT}
)
"""Causes that lie in weights which no update explains."""


class Deviation(StrEnum):
    """In what the run first differed from its replay; the values are written to the journal."""

    NONE = "none"
    LOSS = "loss"
    """The loss: weights or buffers were not what the steps before had made them."""
    UNIT = "unit"
    """Loss and gradients alike, by one factor: the loop computes another loss than step_fn."""
    GRADIENT = "gradient"
    """The gradients, at the same loss."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first attempt at which a run differed from its replay, and in what."""

    kind: Deviation
    attempt: int = -1
    factor: float = 1.0
    """Loss of the run over that of the replay."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a trial found."""

    harmed: bool
    """A branch ends better than the run as it is, beyond the noise of the probes."""
    best: BranchId = BranchId.NOTHING
    """The branch to continue from."""
    causes: frozenset[Cause] = frozenset()
    """The causes that explain the branches; empty where they do not tell."""
    detail: str = ""


def first_difference(rows: Mapping[int, StepMetrics], replay: BranchResult, onset: int) -> Difference:
    """Where the run, as recorded, first differs from its replay by more than it usually does before the onset."""
    earlier = [
        (_relative(rows[k].loss, replay.losses[k]), _relative(rows[k].norm, replay.norms[k]))
        for k in replay.losses
        if k in rows and k < onset
    ]
    usual_loss, usual_norm = (_lower_quartile(values) for values in zip(*earlier, strict=True)) if earlier else (0.0, 0.0)
    loss_limit, norm_limit = LOSS_TOLERANCE + NOISE_FACTOR * usual_loss, NORM_TOLERANCE + NOISE_FACTOR * usual_norm
    for attempt in sorted(replay.losses.keys() & rows.keys()):
        row, loss, norm = rows[attempt], replay.losses[attempt], replay.norms[attempt]
        off, norm_off = _relative(row.loss, loss), _relative(row.norm, norm)
        if off > loss_limit:
            factor = row.loss / loss if loss and math.isfinite(loss) else math.inf
            same = math.isfinite(factor) and _relative(row.norm, factor * norm) <= norm_limit
            return Difference(Deviation.UNIT if same and factor > 0 else Deviation.LOSS, attempt, factor)
        if norm_off > norm_limit:
            return Difference(Deviation.GRADIENT, attempt)
    return Difference(Deviation.NONE)


def _lower_quartile(values: Sequence[float]) -> float:
    """The trouble may have begun some steps before the onset, so the median would be too high."""
    return sorted(values)[len(values) // 4]


def _relative(value: float, other: float) -> float:
    """By how much two numbers differ; nothing where both are not finite."""
    if not math.isfinite(value) or not math.isfinite(other):
        return 0.0 if math.isfinite(value) == math.isfinite(other) else math.inf
    return abs(value - other) / max(abs(value), abs(other), 1e-30)


def conclude(
    results: Mapping[BranchId, BranchResult],
    reference: Sequence[float],
    difference: Difference,
    changed: frozenset[Cause],
    *,
    clipped: bool,
) -> Conclusion:
    """What follows from the branches; `changed` are causes among the settings that have changed since the snapshot,
    `clipped` says that the loop clipped before."""
    nothing = results[BranchId.NOTHING].probe_losses
    best = BranchId.NOTHING
    for branch in _candidates(difference, changed):
        losses = results[branch].probe_losses if branch in results else (math.inf,)
        if branch not in results or not is_better(losses, nothing):
            continue
        if best is BranchId.NOTHING or is_better(losses, results[best].probe_losses):
            best = branch
    if best is BranchId.NOTHING:
        return Conclusion(False, detail="no branch ends better than the run as it is")
    ended = results[best].probe_losses
    detail = f"{best.value}: probe loss {statistics.fmean(ended):.4g}, {statistics.fmean(nothing):.4g} as it is"
    causes = _causes(results, difference, best, changed, clipped=clipped)
    if is_better(reference, ended):  # nothing that was trained since is worth keeping
        return Conclusion(True, BranchId.REWIND, causes, detail)
    return Conclusion(True, best, causes, detail)


def _candidates(difference: Difference, changed: frozenset[Cause]) -> Iterator[BranchId]:
    """The branches to continue from, those that lose least first."""
    if difference.kind is not Deviation.NONE:
        yield BranchId.REPLAY
    if changed:
        yield BranchId.OLD_SETTINGS
    yield BranchId.SKIP
    yield BranchId.CLIP
    yield BranchId.FLOAT32


def _causes(
    results: Mapping[BranchId, BranchResult],
    difference: Difference,
    best: BranchId,
    changed: frozenset[Cause],
    *,
    clipped: bool,
) -> frozenset[Cause]:
    nothing = results[BranchId.NOTHING].probe_losses
    cures = {b for b, r in results.items() if b is not BranchId.NOTHING and is_better(r.probe_losses, nothing)}
    if difference.kind is Deviation.UNIT:
        return frozenset({Cause.ACCUMULATION})
    if difference.kind is Deviation.GRADIENT:
        return frozenset({Cause.TRANSIENT, Cause.ACCUMULATION, Cause.PRECISION_UNDERFLOW})
    if difference.kind is Deviation.LOSS:
        replay, old_weights = results.get(BranchId.REPLAY), results.get(BranchId.OLD_WEIGHTS)
        if replay is None or old_weights is None:
            return WEIGHT_CAUSES | {Cause.OPTIMIZER_STATE}
        harm = old_weights.probe_loss > (1.0 + OPTIMIZER_HARM) * replay.probe_loss
        damaged = not math.isfinite(old_weights.probe_loss) or (harm and gain(replay.probe_losses, old_weights.probe_losses) > 1)
        return frozenset({Cause.OPTIMIZER_STATE}) if damaged else WEIGHT_CAUSES
    if changed and BranchId.OLD_SETTINGS in cures:
        return changed
    if BranchId.FLOAT32 in cures:
        return frozenset({Cause.PRECISION_OVERFLOW, Cause.PRECISION_UNDERFLOW})
    if BranchId.CLIP in cures and clipped:
        return frozenset({Cause.EXPLODING_GRADIENT})
    if BranchId.SKIP in cures:
        return DATA_CAUSES
    return frozenset()

"""What the branches of a trial mean: whether the run was harmed, by what, and from which branch to continue."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from surefoot.judge.thresholds import REPEAT_COUNT
from surefoot.records import Cause, Event, StepMetrics
from surefoot.trials.branches import BRANCHES, LAST_BRANCHES, BranchId, BranchResult, is_better

LOSS_TOLERANCE = 0.03
"""Relative difference of a loss from its replay that rounding explains."""
NORM_TOLERANCE = 0.15
"""The same for gradient norms, which scatter more."""
UNIT_TOLERANCE = 0.01
"""By how much loss and gradients may have grown unequally where only their unit has changed, at the same weights."""
LASTING_SHARE = 0.6
"""The share of the steps from a deviation on that must deviate too."""
EXCESS_UPDATE = 3.0
"""An update that moves the weights this many times further than usual speaks for a damaged optimizer state."""

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
UNIT_CAUSES = frozenset({Cause.ACCUMULATION})
LASTING_GRADIENT_CAUSES = frozenset({Cause.ACCUMULATION, Cause.PRECISION_UNDERFLOW})
GRADIENT_CAUSES = LASTING_GRADIENT_CAUSES | {Cause.TRANSIENT}
PRECISION_CAUSES = frozenset({Cause.PRECISION_OVERFLOW, Cause.PRECISION_UNDERFLOW})


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
    lasting: bool = False
    """The same difference again in each of the next steps: not of a disturbance that is over at once."""


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


class TrialResult(StrEnum):
    """What came of a trial."""

    CONTINUED = "continued"
    """The run continues from the branch that helped."""
    REWOUND = "rewound"
    """Nothing that was trained since the snapshot is worth keeping."""
    LEFT_ALONE = "left_alone"
    """No branch ends better than the run as it is."""
    NOT_RUN = "not_run"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEvent(Event):
    """A trial: short runs from a snapshot over kept batches, each with one thing changed, listed in `values`."""

    kind: ClassVar[str] = "trial"
    result: TrialResult
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)


SAME = Difference(Deviation.NONE)
NOTHING_FOUND = Conclusion(harmed=False)


def first_difference(rows: Mapping[int, StepMetrics], replay: BranchResult) -> Difference:
    """Where the run, as recorded, first differs from its replay, and from there on in most of its steps."""
    attempts = sorted(replay.losses.keys() & rows.keys())
    loss_off = [_relative(rows[k].loss, replay.losses[k]) for k in attempts]
    norm_off = [_relative(rows[k].norm, replay.norms[k]) for k in attempts]
    differs = [a > LOSS_TOLERANCE or b > NORM_TOLERANCE for a, b in zip(loss_off, norm_off, strict=True)]
    for i, attempt in enumerate(attempts):
        if not differs[i] or sum(differs[i:]) < LASTING_SHARE * len(differs[i:]):
            continue
        row, norm = rows[attempt], replay.norms[attempt]
        if loss_off[i] <= LOSS_TOLERANCE:
            next_ones = range(i, min(i + REPEAT_COUNT, len(attempts)))
            lasting = all(loss_off[k] <= LOSS_TOLERANCE and norm_off[k] > NORM_TOLERANCE for k in next_ones)
            return Difference(Deviation.GRADIENT, attempt, lasting and len(next_ones) == REPEAT_COUNT)
        factor = row.loss / replay.losses[attempt] if replay.losses[attempt] else math.inf
        same = 0 < factor < math.inf and _relative(row.norm, factor * norm) <= UNIT_TOLERANCE
        return Difference(Deviation.UNIT if same else Deviation.LOSS, attempt)
    return SAME


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
    update_excess: float,
) -> Conclusion:
    """What follows from the branches.

    `changed` are causes among the settings that have changed since the snapshot, `clipped` says that the loop clipped
    before, and `update_excess` how many times further than usual an update moved the weights since the difference.
    """
    nothing = results[BranchId.NOTHING].probe_losses
    best = BranchId.NOTHING
    harmed = is_better(reference, nothing)
    for branch in _candidates(difference, changed, harmed=harmed):
        losses = results[branch].probe_losses if branch in results else (math.inf,)
        if branch not in results or not is_better(losses, nothing):
            continue
        if best is BranchId.NOTHING or is_better(losses, results[best].probe_losses):
            best = branch
    if best is BranchId.NOTHING:
        return Conclusion(False, detail="no branch ends better than the run as it is: it is left alone")
    ended = results[best].probe_losses
    detail = (
        f"the loss on {len(ended)} probe batches is {statistics.fmean(nothing):.4g} as the run is, and "
        f"{statistics.fmean(ended):.4g} after the updates since the snapshot were trained again {BRANCHES[best].text}"
    )
    useless = is_better(reference, ended)  # nothing that was trained since is worth keeping
    causes = (
        # Smaller updates do less harm whatever the harm is: only one that cures is the cause.
        (frozenset[Cause]() if useless else frozenset({BRANCHES[best].cause}))
        if BRANCHES[best] in LAST_BRANCHES
        else _causes(results, reference, difference, changed, clipped=clipped, update_excess=update_excess)
    )
    if useless:
        return Conclusion(True, BranchId.REWIND, causes, detail)
    return Conclusion(True, best, causes, detail)


def _candidates(difference: Difference, changed: frozenset[Cause], *, harmed: bool) -> Iterator[BranchId]:
    """The branches to continue from, those that lose least first.

    Smaller updates make nearly any loss lower for a while: they count only where the run is worse than it was.
    """
    if difference.kind is not Deviation.NONE:
        yield BranchId.REPLAY
    if changed and harmed:
        yield BranchId.OLD_SETTINGS
    yield BranchId.SKIP
    if harmed:
        yield from (BranchId.CLIP, BranchId.FLOAT32, *(branch.id for branch in LAST_BRANCHES))


def batches_alone_harm(results: Mapping[BranchId, BranchResult], reference: Sequence[float]) -> bool:
    """With the settings of now, but batches from before the trouble, the run ends no worse than it was."""
    others = results.get(BranchId.OLD_BATCHES)
    return others is not None and not is_better(reference, others.probe_losses)


def _causes(
    results: Mapping[BranchId, BranchResult],
    reference: Sequence[float],
    difference: Difference,
    changed: frozenset[Cause],
    *,
    clipped: bool,
    update_excess: float,
) -> frozenset[Cause]:
    """The causes that explain what cures and where the run differs from its replay."""
    if difference.kind is Deviation.LOSS:
        swapped = results.get(BranchId.OPTIMIZER_NOW)
        by_optimizer = swapped is not None and is_better(reference, swapped.probe_losses)
        return frozenset({Cause.OPTIMIZER_STATE}) if by_optimizer or update_excess > EXCESS_UPDATE else WEIGHT_CAUSES
    if difference.kind is Deviation.GRADIENT:
        return LASTING_GRADIENT_CAUSES if difference.lasting else GRADIENT_CAUSES
    if difference.kind is Deviation.UNIT:
        return UNIT_CAUSES
    if batches_alone_harm(results, reference):
        return DATA_CAUSES
    nothing = results[BranchId.NOTHING].probe_losses
    by_cure = (
        (BranchId.OLD_SETTINGS, changed),
        (BranchId.FLOAT32, PRECISION_CAUSES),
        (BranchId.CLIP, frozenset({Cause.EXPLODING_GRADIENT}) if clipped else frozenset[Cause]()),
        (BranchId.SKIP, DATA_CAUSES),
    )
    cures = (c for b, c in by_cure if c and b in results and is_better(results[b].probe_losses, nothing))
    return next(cures, frozenset())

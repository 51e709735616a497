"""What is wrong with weights: values that are no numbers, sizes out of all proportion, layers that do nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from surefoot.logs.answer import RunHealth
from surefoot.logs.checkpoint.figures import Figures
from surefoot.logs.checkpoint.finding import Finding, finding, listed
from surefoot.logs.checkpoint.held import Held
from surefoot.logs.checkpoint.roles import Role, family
from surefoot.records import Cause, Pattern

HALF_LIMIT = 65504.0
_TIMES_SIBLINGS = 30.0
_TIMES_NEXT = 10.0
_TIMES_START = 20.0
"""Root mean square of a matrix against what a start by its fan-in gives; healthy ones stay within a few times."""
_EXPLODED = 1e6
_FEWEST_SIBLINGS = 4
_SMALLEST = 16
_ANYTHING = ("cache",)
_UNMEASURED = (*_ANYTHING, "mask", "alibi", "min_val", "max_val", "sigma")
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that was looked at."""

    held: Held
    role: Role
    figures: Figures

    @property
    def name(self) -> str:
        return self.held.name

    @property
    def start(self) -> float:
        """Root mean square that a usual start gives: one over the root of the fan-in."""
        shape = self.held.shape
        return 1.0 / math.sqrt(max(1, math.prod(shape[1:])))


Weights = Sequence[Weight]


def nonfinite(weights: Weights) -> Finding | None:
    broken = [one for one in weights if one.figures.bad and not _may_be_infinite(one)]
    if not broken:
        return None
    trained = [one for one in weights if one.role is not Role.BUFFER] or weights
    nans, infinities = (
        sum(one.figures.nans for one in broken),
        sum(one.figures.plus + one.figures.minus for one in broken),
    )
    kinds = " and ".join(
        word for word, count in ((f"{nans:,} NaN", nans), (f"{infinities:,} Inf", infinities)) if count
    )
    share = f"{len(broken):,} of {len(weights):,} tensors"
    overflowed = not nans and all(one.held.dtype == "float16" for one in broken)
    advice = ["Do not go on from this checkpoint: take the last one before it that is whole."]
    if overflowed:
        advice.append("Convert from float32 or bfloat16 again: float16 ends at 65504. Keep these layers in bfloat16.")
    elif len(broken) > len(trained) / 2:
        advice.append("An update with NaN gradients went through: refuse such steps, clip the norm, lower the rate.")
    else:
        advice.append(
            "Few tensors are hit: look at what feeds them (a bad batch, a rare token, a hand-made conversion)."
        )
    return finding(
        RunHealth.FAILED,
        f"The weights are broken: {kinds} in {share}.",
        Cause.PRECISION_OVERFLOW if overflowed else Cause.WEIGHTS_DAMAGED,
        confidence=0.95 if not overflowed else 0.8,
        evidence=[_told_bad(one) for one in broken[:8]] + ([f"{len(broken) - 8:,} more"] if len(broken) > 8 else []),
        advice=advice,
        pattern=Pattern.NONFINITE,
    )


def _may_be_infinite(one: Weight) -> bool:
    """Masks are made of minus infinity, a lone infinity marks what is not measured yet, a cache holds anything."""
    if one.figures.masks or (one.held.count == 1 and not one.figures.nans):
        return True
    words = _UNMEASURED if not one.figures.nans else _ANYTHING
    return one.role is Role.BUFFER and any(word in one.name.lower() for word in words)


def _told_bad(one: Weight) -> str:
    figures = one.figures
    parts = [
        f"{count:,} {word}" for count, word in ((figures.nans, "NaN"), (figures.plus, "Inf"), (figures.minus, "-Inf"))
    ]
    kinds = ", ".join(part for part in parts if not part.startswith("0 "))
    rows = f", in {figures.broken_rows:,} of {figures.rows:,} rows" if 0 < figures.broken_rows < figures.rows else ""
    return f"tensor {one.name} ({one.held.dtype}): {kinds} of {figures.count:,} values{rows}"


def near_the_limit(weights: Weights) -> Finding | None:
    """float16 weights close to the largest number there is."""
    close = [one for one in weights if one.held.dtype == "float16" and one.figures.largest >= HALF_LIMIT / 2]
    close = [one for one in close if one.role is not Role.BUFFER and not one.figures.constant]
    if not close:
        return None
    return finding(
        RunHealth.WARNING,
        f"Weights reach {close[0].figures.largest:,.0f} in {listed([one.name for one in close])}: too near to 65504.",
        Cause.PRECISION_OVERFLOW,
        confidence=0.7,
        advice=[
            "Use bfloat16 or float32 for this model.",
            "Look at the step where these weights grew: lower the rate.",
        ],
    )


def absurd(weights: Weights) -> Finding | None:
    """Weights far beyond any start and any sibling."""
    layers = [one for one in weights if one.role in (Role.MATRIX, Role.EMBEDDING, Role.NORM, Role.BIAS)]
    exploded = [one for one in layers if one.figures.largest >= (_EXPLODED if one.role is not Role.BIAS else 1e10)]
    if exploded:
        worst = max(exploded, key=lambda one: one.figures.largest)
        return finding(
            RunHealth.FAILED,
            f"Weights have exploded: up to {worst.figures.largest:.3g} in {worst.name}"
            + (f", and {len(exploded) - 1:,} more tensors beyond 1e6." if len(exploded) > 1 else "."),
            Cause.WEIGHTS_DAMAGED if len(exploded) == 1 else Cause.EXPLODING_GRADIENT,
            confidence=0.8,
            evidence=[_told_size(one) for one in exploded[:8]],
            advice=[
                "Take an earlier checkpoint.",
                "A single value beyond all others is a flipped bit or a bad copy: compare with the original file."
                if len(exploded) == 1
                else "Clip the gradient norm and lower the learning rate before you go on.",
            ],
        )
    large = [one for one in layers if one.role is Role.MATRIX and one.figures.rms > _TIMES_START * max(one.start, 0.05)]
    large += [one for one in _beyond_siblings(layers) if one not in large]
    if not large:
        return None
    worst = max(large, key=lambda one: one.figures.rms / one.start)
    return finding(
        RunHealth.WARNING,
        f"The layer {worst.name} is out of proportion: {_size(worst)}.",
        Cause.EXPLODING_GRADIENT,
        confidence=0.5,
        evidence=[_told_size(one) for one in large[:8]],
        advice=[
            "Compare with an earlier checkpoint: a norm that keeps growing ends in NaN.",
            "Clip, or decay the weights.",
        ],
    )


def _beyond_siblings(layers: Weights) -> list[Weight]:
    """Tensors many times as large as the same part of every other layer."""
    families: dict[tuple[str, tuple[int, ...]], list[Weight]] = defaultdict(list)
    for one in layers:
        families[family(one.name), one.held.shape].append(one)
    found: list[Weight] = []
    for siblings in families.values():
        if len(siblings) < _FEWEST_SIBLINGS or siblings[0].role is Role.BIAS:
            continue
        sizes = sorted(one.figures.rms for one in siblings)
        middle, last, largest = median(sizes), sizes[-2], sizes[-1]
        if middle > 0 and largest > _TIMES_SIBLINGS * middle and largest > _TIMES_NEXT * last:
            found += [one for one in siblings if one.figures.rms == largest]
    return found


def _size(one: Weight) -> str:
    if one.role is Role.MATRIX:
        return f"root mean square {one.figures.rms:.3g}, {one.figures.rms / one.start:,.0f} times that of a usual start"
    return f"root mean square {one.figures.rms:.3g}, far beyond the same part of the other layers"


def _told_size(one: Weight) -> str:
    return f"tensor {one.name}: largest {one.figures.largest:.3g}, root mean square {one.figures.rms:.3g}"


def dead(weights: Weights) -> Finding | None:
    """Whole matrices of one value: never trained, or wiped out."""
    layers = [one for one in weights if one.role is Role.MATRIX and one.held.count >= _SMALLEST]
    still = [one for one in layers if one.figures.constant]
    if not still:
        return None
    zero = [one for one in still if one.figures.largest == 0]
    what = "nothing but zeros" if len(zero) == len(still) else "one and the same value throughout"
    families = {family(one.name) for one in layers if not one.figures.constant}
    odd = [one for one in still if family(one.name) in families]
    return finding(
        RunHealth.WARNING,
        f"{'The layer' if len(still) == 1 else 'The layers'} {listed([one.name for one in still])}"
        f" {'holds' if len(still) == 1 else 'hold'} {what}"
        + (": the same part of other layers does not." if odd else "."),
        Cause.NOT_UPDATING if not odd else Cause.WEIGHTS_DAMAGED,
        confidence=0.6 if odd else 0.5,
        evidence=[f"tensor {one.name} {list(one.held.shape)}: all {one.figures.high:g}" for one in still[:8]],
        advice=[
            "A layer that starts at zero and stays there gets no gradient: is it part of the loss, and not frozen?",
            "If it was pruned on purpose, all is well.",
        ],
    )


def dead_units(weights: Weights) -> Finding | None:
    """A quarter of a layer's units without any weight."""
    hit = [
        one
        for one in weights
        if one.role is Role.MATRIX
        and not one.figures.constant
        and one.figures.empty_rows >= max(4, one.figures.rows / 4)
    ]
    if not hit:
        return None
    worst = max(hit, key=lambda one: one.figures.empty_rows / one.figures.rows)
    return finding(
        RunHealth.WARNING,
        f"{worst.figures.empty_rows:,} of {worst.figures.rows:,} units of {worst.name} have no weight but zero"
        + (f", and so in {len(hit) - 1:,} more layers." if len(hit) > 1 else "."),
        Cause.DEAD_UNITS,
        confidence=0.6,
        evidence=[
            f"tensor {one.name}: {one.figures.empty_rows:,} of {one.figures.rows:,} rows are zero" for one in hit[:8]
        ],
        advice=["If it was pruned on purpose, all is well.", "Otherwise lower the weight decay or the learning rate."],
    )


def adapter(weights: Weights) -> Finding | None:
    """A low-rank adapter starts as nothing: its second half is zero until it is trained."""
    halves = [one for one in weights if one.role is Role.ADAPTER]
    zero = [one for one in halves if one.figures.constant and one.figures.largest == 0]
    if not zero or len(zero) < len(halves) / 2:
        return None
    return finding(
        RunHealth.WARNING,
        f"The adapter was never trained: {len(zero):,} of {len(halves):,} of its B matrices are exactly zero.",
        Cause.NOT_UPDATING,
        confidence=0.9 if len(zero) == len(halves) else 0.6,
        evidence=[f"tensor {one.name} {list(one.held.shape)}: all 0" for one in zero[:4]],
        advice=[
            "Check that the adapter's parameters require a gradient and that the optimizer was made after the adapter.",
            "Check that the checkpoint was saved after training, and from the trained object.",
        ],
    )


def at_the_start(weights: Weights, counters: dict[str, int]) -> Finding | None:
    """Normalisations that all stand exactly where they start: factor 1, bias 0."""
    norms = {one.name.rpartition(".")[0]: one for one in weights if one.role is Role.NORM and one.held.count >= 8}
    ones = [one for one in norms.values() if one.figures.constant and one.figures.high == 1.0]
    biases = [one for one in weights if one.role is Role.BIAS and one.name.rpartition(".")[0] in norms]
    moved = any(one.figures.largest > 0 for one in biases)
    if len(ones) < 2 or len(ones) < len(norms) or moved or any(counters.values()):
        return None
    rounded = all(one.held.dtype in _HALVES for one in ones)
    advice = ["If the model was meant to be trained: does the optimizer have all parameters, and is the rate above 0?"]
    if rounded:
        advice.append("Weights in half precision round small updates away: keep float32 weights in the optimizer.")
    unseen = " and no batch norm has seen a batch" if counters else ""
    return finding(
        RunHealth.WARNING,
        f"All {len(ones):,} normalisation layers stand exactly where they start (weight 1, bias 0){unseen}:"
        " the model looks untrained, or they were frozen.",
        Cause.PRECISION_UNDERFLOW if rounded else Cause.NOT_UPDATING,
        confidence=0.5,
        evidence=[f"tensor {one.name}: all 1" for one in ones[:4]],
        advice=advice,
    )


def variances(weights: Weights) -> Finding | None:
    """What batch norms have measured: never negative, seldom zero, never astronomic."""
    for one in weights:
        if not one.name.endswith("running_var") or one.figures.bad:
            continue
        figures = one.figures
        if figures.low < 0:
            sentence, state, cause = (
                f"The statistic {one.name} has negative values: a variance has none.",
                RunHealth.FAILED,
                Cause.WEIGHTS_DAMAGED,
            )
        elif figures.high > 1e12:
            sentence = (
                f"The statistic {one.name} reaches {figures.high:.3g}: activations exploded while it was measured."
            )
            state, cause = RunHealth.WARNING, Cause.EXPLODING_GRADIENT
        elif figures.zeros >= max(2, figures.count / 2):
            sentence = f"{figures.zeros:,} of {figures.count:,} channels of {one.name} have a variance of exactly 0."
            state, cause = RunHealth.WARNING, Cause.ZERO_VARIANCE
        else:
            continue
        return finding(
            state,
            sentence,
            cause,
            confidence=0.7,
            advice=[
                "Look at what goes into this layer: channels that are constant, or values out of range.",
                "Measure the statistics again by running some batches in training mode, once the input is right.",
            ],
        )
    return None


CHECKS: tuple[Callable[[Weights], Finding | None], ...] = (
    nonfinite, absurd, variances, near_the_limit, adapter, dead, dead_units,
)  # fmt: skip

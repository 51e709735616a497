"""Checks of the weights: non-finite values, sizes out of proportion, layers that do nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from surefoot.inspect.checkpoint_finding import CheckpointFinding, list_names, make_finding
from surefoot.inspect.contents import StoredTensor
from surefoot.inspect.tensor_stats import TensorRole, TensorStats, layer_family
from surefoot.logs.log_diagnosis import RunHealth
from surefoot.records import Cause, Pattern

FLOAT16_MAX = 65504.0
_SIBLING_FACTOR = 30.0
_NEXT_LARGEST_FACTOR = 10.0
_INIT_FACTOR = 20.0
"""RMS of a matrix relative to a fan-in initialisation; healthy matrices stay within a few times."""
_EXPLODED = 1e6
_MIN_SIBLINGS = 4
_MIN_NUMEL = 16
_UNINITIALISED = ("cache",)
_MAY_BE_INFINITE = (*_UNINITIALISED, "mask", "alibi", "min_val", "max_val", "sigma")
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class MeasuredWeight:
    """A tensor with its role and statistics."""

    tensor: StoredTensor
    role: TensorRole
    stats: TensorStats

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def init_rms(self) -> float:
        """RMS of the usual initialisation: 1 / sqrt(fan-in)."""
        shape = self.tensor.shape
        return 1.0 / math.sqrt(max(1, math.prod(shape[1:])))


Weights = Sequence[MeasuredWeight]


def nonfinite_weights(weights: Weights) -> CheckpointFinding | None:
    nonfinite = [weight for weight in weights if weight.stats.nonfinite and not _may_be_infinite(weight)]
    if not nonfinite:
        return None
    trained = [weight for weight in weights if weight.role is not TensorRole.BUFFER] or weights
    nans = sum(weight.stats.nans for weight in nonfinite)
    infs = sum(weight.stats.plus_infs + weight.stats.minus_infs for weight in nonfinite)
    counts = " and ".join(text for text, count in ((f"{nans:,} NaN", nans), (f"{infs:,} Inf", infs)) if count)
    overflowed = not nans and all(weight.tensor.dtype == "float16" for weight in nonfinite)
    advice = ["Do not resume from this checkpoint: use the last one before it that has finite weights."]
    if overflowed:
        advice.append("Convert from float32 or bfloat16 again: float16 ends at 65504. Keep these layers in bfloat16.")
    elif len(nonfinite) > len(trained) / 2:
        advice.append(
            "An update with NaN gradients was applied: veto such steps, clip the gradient norm, lower the lr."
        )
    else:
        advice.append("Few tensors are affected: check their inputs (a bad batch, a rare token, a manual conversion).")
    more = [f"{len(nonfinite) - 8:,} more"] if len(nonfinite) > 8 else []
    return make_finding(
        RunHealth.FAILED,
        f"The weights are broken: {counts} in {len(nonfinite):,} of {len(weights):,} tensors.",
        Cause.PRECISION_OVERFLOW if overflowed else Cause.WEIGHTS_DAMAGED,
        confidence=0.95 if not overflowed else 0.8,
        evidence=[_nonfinite_evidence(weight) for weight in nonfinite[:8]] + more,
        advice=advice,
        pattern=Pattern.NONFINITE,
    )


def _may_be_infinite(weight: MeasuredWeight) -> bool:
    """Masks contain -Inf, a single Inf marks a value not measured yet, and a cache may be uninitialised."""
    if weight.stats.is_mask or (weight.tensor.numel == 1 and not weight.stats.nans):
        return True
    words = _MAY_BE_INFINITE if not weight.stats.nans else _UNINITIALISED
    return weight.role is TensorRole.BUFFER and any(word in weight.name.lower() for word in words)


def _nonfinite_evidence(weight: MeasuredWeight) -> str:
    stats = weight.stats
    parts = [
        f"{count:,} {word}"
        for count, word in ((stats.nans, "NaN"), (stats.plus_infs, "Inf"), (stats.minus_infs, "-Inf"))
    ]
    kinds = ", ".join(part for part in parts if not part.startswith("0 "))
    rows = f", in {stats.nonfinite_rows:,} of {stats.rows:,} rows" if 0 < stats.nonfinite_rows < stats.rows else ""
    return f"tensor {weight.name} ({weight.tensor.dtype}): {kinds} of {stats.count:,} values{rows}"


def near_float16_max(weights: Weights) -> CheckpointFinding | None:
    """float16 weights at half of the float16 maximum or more."""
    close = [weight for weight in weights if weight.tensor.dtype == "float16"]
    close = [weight for weight in close if weight.stats.abs_max >= FLOAT16_MAX / 2]
    close = [weight for weight in close if weight.role is not TensorRole.BUFFER and not weight.stats.is_constant]
    if not close:
        return None
    names = list_names([weight.name for weight in close])
    return make_finding(
        RunHealth.WARNING,
        f"Weights reach {close[0].stats.abs_max:,.0f} in {names}: too close to the float16 maximum of 65504.",
        Cause.PRECISION_OVERFLOW,
        confidence=0.7,
        advice=[
            "Use bfloat16 or float32 for this model.",
            "Find the step at which these weights grew, and lower the learning rate.",
        ],
    )


def oversized_weights(weights: Weights) -> CheckpointFinding | None:
    """Weights far beyond any initialisation and any sibling layer."""
    roles = (TensorRole.MATRIX, TensorRole.EMBEDDING, TensorRole.NORM, TensorRole.BIAS)
    layers = [weight for weight in weights if weight.role in roles]
    exploded = [
        weight
        for weight in layers
        if weight.stats.abs_max >= (_EXPLODED if weight.role is not TensorRole.BIAS else 1e10)
    ]
    if exploded:
        worst = max(exploded, key=lambda weight: weight.stats.abs_max)
        return make_finding(
            RunHealth.FAILED,
            f"Weights have exploded: up to {worst.stats.abs_max:.3g} in {worst.name}"
            + (f", and {len(exploded) - 1:,} more tensors above 1e6." if len(exploded) > 1 else "."),
            Cause.WEIGHTS_DAMAGED if len(exploded) == 1 else Cause.EXPLODING_GRADIENT,
            confidence=0.8,
            evidence=[_size_evidence(weight) for weight in exploded[:8]],
            advice=[
                "Use an earlier checkpoint.",
                "A single value beyond all others is a flipped bit or a bad copy: compare with the original file."
                if len(exploded) == 1
                else "Clip the gradient norm and lower the learning rate before you resume.",
            ],
        )
    matrices = [weight for weight in layers if weight.role is TensorRole.MATRIX]
    large = [weight for weight in matrices if weight.stats.rms > _INIT_FACTOR * max(weight.init_rms, 0.05)]
    large += [weight for weight in _beyond_siblings(layers) if weight not in large]
    if not large:
        return None
    worst = max(large, key=lambda weight: weight.stats.rms / weight.init_rms)
    return make_finding(
        RunHealth.WARNING,
        f"The layer {worst.name} is out of proportion: {_relative_size(worst)}.",
        Cause.EXPLODING_GRADIENT,
        confidence=0.5,
        evidence=[_size_evidence(weight) for weight in large[:8]],
        advice=[
            "Compare with an earlier checkpoint: a norm that keeps growing ends in NaN.",
            "Clip the gradient norm, or add weight decay.",
        ],
    )


def _beyond_siblings(layers: Weights) -> list[MeasuredWeight]:
    """Tensors many times as large as the same tensor of every other layer."""
    families: dict[tuple[str, tuple[int, ...]], list[MeasuredWeight]] = defaultdict(list)
    for weight in layers:
        families[layer_family(weight.name), weight.tensor.shape].append(weight)
    outliers: list[MeasuredWeight] = []
    for siblings in families.values():
        if len(siblings) < _MIN_SIBLINGS or siblings[0].role is TensorRole.BIAS:
            continue
        sizes = sorted(weight.stats.rms for weight in siblings)
        typical, next_largest, largest = median(sizes), sizes[-2], sizes[-1]
        if typical > 0 and largest > _SIBLING_FACTOR * typical and largest > _NEXT_LARGEST_FACTOR * next_largest:
            outliers += [weight for weight in siblings if weight.stats.rms == largest]
    return outliers


def _relative_size(weight: MeasuredWeight) -> str:
    if weight.role is TensorRole.MATRIX:
        ratio = weight.stats.rms / weight.init_rms
        return f"RMS {weight.stats.rms:.3g}, {ratio:,.0f} times that of the usual initialisation"
    return f"RMS {weight.stats.rms:.3g}, far above the same tensor of the other layers"


def _size_evidence(weight: MeasuredWeight) -> str:
    return f"tensor {weight.name}: largest {weight.stats.abs_max:.3g}, RMS {weight.stats.rms:.3g}"


def constant_layers(weights: Weights) -> CheckpointFinding | None:
    """Whole matrices of one value: never trained, or wiped."""
    layers = [weight for weight in weights if weight.role is TensorRole.MATRIX and weight.tensor.numel >= _MIN_NUMEL]
    constant = [weight for weight in layers if weight.stats.is_constant]
    if not constant:
        return None
    zero = [weight for weight in constant if weight.stats.abs_max == 0]
    what = "only zeros" if len(zero) == len(constant) else "one constant value"
    families = {layer_family(weight.name) for weight in layers if not weight.stats.is_constant}
    odd = [weight for weight in constant if layer_family(weight.name) in families]
    subject = "The layer" if len(constant) == 1 else "The layers"
    verb = "holds" if len(constant) == 1 else "hold"
    return make_finding(
        RunHealth.WARNING,
        f"{subject} {list_names([weight.name for weight in constant])} {verb} {what}"
        + (", unlike the same part of other layers." if odd else "."),
        Cause.NOT_UPDATING if not odd else Cause.WEIGHTS_DAMAGED,
        confidence=0.6 if odd else 0.5,
        evidence=[
            f"tensor {weight.name} {list(weight.tensor.shape)}: all {weight.stats.max:g}" for weight in constant[:8]
        ],
        advice=[
            "A layer that stays at zero gets no gradient: check that it is used in the loss and not frozen.",
            "If it was pruned on purpose, ignore this.",
        ],
    )


def dead_units(weights: Weights) -> CheckpointFinding | None:
    """A quarter or more of a layer's units have only zero weights."""
    hit = [
        weight
        for weight in weights
        if weight.role is TensorRole.MATRIX
        and not weight.stats.is_constant
        and weight.stats.zero_rows >= max(4, weight.stats.rows / 4)
    ]
    if not hit:
        return None
    worst = max(hit, key=lambda weight: weight.stats.zero_rows / weight.stats.rows)
    return make_finding(
        RunHealth.WARNING,
        f"{worst.stats.zero_rows:,} of {worst.stats.rows:,} units of {worst.name} have only zero weights"
        + (f", as do units of {len(hit) - 1:,} more layers." if len(hit) > 1 else "."),
        Cause.DEAD_UNITS,
        confidence=0.6,
        evidence=[
            f"tensor {weight.name}: {weight.stats.zero_rows:,} of {weight.stats.rows:,} rows are zero"
            for weight in hit[:8]
        ],
        advice=["If it was pruned on purpose, ignore this.", "Otherwise lower the weight decay or the learning rate."],
    )


def untrained_adapter(weights: Weights) -> CheckpointFinding | None:
    """LoRA B matrices are zero until they are trained."""
    halves = [weight for weight in weights if weight.role is TensorRole.ADAPTER]
    zero = [weight for weight in halves if weight.stats.is_constant and weight.stats.abs_max == 0]
    if not zero or len(zero) < len(halves) / 2:
        return None
    return make_finding(
        RunHealth.WARNING,
        f"The adapter was never trained: {len(zero):,} of {len(halves):,} of its B matrices are exactly zero.",
        Cause.NOT_UPDATING,
        confidence=0.9 if len(zero) == len(halves) else 0.6,
        evidence=[f"tensor {weight.name} {list(weight.tensor.shape)}: all 0" for weight in zero[:4]],
        advice=[
            "Check that the adapter's parameters require grad and that the optimizer was created after the adapter.",
            "Check that the checkpoint was saved after training, and from the trained object.",
        ],
    )


def norms_at_init(weights: Weights, counters: dict[str, int]) -> CheckpointFinding | None:
    """All normalisation layers are exactly as initialised: weight 1, bias 0."""
    layers = [weight for weight in weights if weight.role is TensorRole.NORM and weight.tensor.numel >= 8]
    norms = {weight.name.rpartition(".")[0]: weight for weight in layers}
    ones = [weight for weight in norms.values() if weight.stats.is_constant and weight.stats.max == 1.0]
    biases = [weight for weight in weights if weight.role is TensorRole.BIAS]
    moved = any(weight.stats.abs_max > 0 for weight in biases if weight.name.rpartition(".")[0] in norms)
    if len(ones) < 2 or len(ones) < len(norms) or moved or any(counters.values()):
        return None
    rounded = all(weight.tensor.dtype in _HALVES for weight in ones)
    advice = ["If the model should be trained: check that the optimizer has all parameters and the lr is above 0."]
    if rounded:
        advice.append("Half-precision weights round small updates away: keep float32 master weights.")
    unseen = " and no batch norm has seen a batch" if counters else ""
    return make_finding(
        RunHealth.WARNING,
        f"All {len(ones):,} normalisation layers are exactly as initialised (weight 1, bias 0){unseen}:"
        " the model looks untrained, or they were frozen.",
        Cause.PRECISION_UNDERFLOW if rounded else Cause.NOT_UPDATING,
        confidence=0.5,
        evidence=[f"tensor {weight.name}: all 1" for weight in ones[:4]],
        advice=advice,
    )


def bad_running_variances(weights: Weights) -> CheckpointFinding | None:
    """Running variances of batch norms that are negative, mostly zero, or huge."""
    for weight in weights:
        if not weight.name.endswith("running_var") or weight.stats.nonfinite:
            continue
        stats = weight.stats
        if stats.min < 0:
            sentence = f"{weight.name} has negative values, which a variance cannot have."
            verdict, cause = RunHealth.FAILED, Cause.WEIGHTS_DAMAGED
        elif stats.max > 1e12:
            sentence = f"{weight.name} reaches {stats.max:.3g}: activations exploded while it was measured."
            verdict, cause = RunHealth.WARNING, Cause.EXPLODING_GRADIENT
        elif stats.zeros >= max(2, stats.count / 2):
            sentence = f"{stats.zeros:,} of {stats.count:,} channels of {weight.name} have a variance of exactly 0."
            verdict, cause = RunHealth.WARNING, Cause.ZERO_VARIANCE
        else:
            continue
        return make_finding(
            verdict,
            sentence,
            cause,
            confidence=0.7,
            advice=[
                "Check the input of this layer: constant channels, or values out of range.",
                "Once the input is right, measure the statistics again by running some batches in training mode.",
            ],
        )
    return None


WEIGHT_CHECKS: tuple[Callable[[Weights], CheckpointFinding | None], ...] = (
    nonfinite_weights, oversized_weights, bad_running_variances, near_float16_max, untrained_adapter, constant_layers,
    dead_units,
)  # fmt: skip

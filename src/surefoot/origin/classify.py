"""What kind of operation made a non-finite value, from its name and the values that went in and came out."""

from __future__ import annotations

from surefoot.origin.op_trace import TracedOp
from surefoot.origin_record import OriginKind

SOURCES = {"batch": OriginKind.BATCH, "weights": OriginKind.WEIGHTS, "buffer": OriginKind.BUFFER}
NORMS = ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "std", "var", "std_mean", "var_mean")
ROOTS = ("sqrt", "rsqrt")
LOGS = ("log", "log2", "log10", "log1p", "logit", "xlogy", "special_xlogy")
NORM_FUNCTIONS = ("norm", "linalg_vector_norm", "linalg_norm", "cdist", "pdist", "hypot")
EXPS = ("exp", "exp2", "expm1", "sinh", "cosh", "special_expit")
POWERS = ("pow", "square", "float_power")
STEEP = ("acos", "asin", "arccos", "arcsin", "atanh", "acosh", "log1p", "erfinv")
MEANS = ("mean", "nll_loss", "nll_loss_forward", "cross_entropy", "nanmean")


def kind_of(op: TracedOp, forward: TracedOp | None) -> OriginKind:
    """The kind of an operation; `forward` is the one whose backward pass it belongs to."""
    if op.source_kind or not op.name:
        return SOURCES.get(op.source_kind, OriginKind.TENSOR)
    if op.constant:
        return OriginKind.CONSTANT
    if op.backward and forward is not None:
        return _kind_in_backward(op, forward)
    return _kind_in_forward(op)


def _kind_in_forward(op: TracedOp) -> OriginKind:
    name, function = op.name, "" if op.site is None else op.site.function
    names = (name, name.strip("_"), function)
    checks = (
        (_any_of(names, ("softmax", "log_softmax", "logsumexp"), within=True), _softmax_kind),
        (_any_of(names, LOGS), _log_kind),
        (_any_of(names, NORMS, within=True), lambda op: OriginKind.ZERO_VARIANCE),
        (_any_of(names, ("div", "reciprocal", "true_divide")), _division_kind),
        (_any_of(names, ROOTS), _root_kind),
        (_any_of(names, EXPS), lambda op: OriginKind.EXP_OVERFLOW),
        (_any_of(names, POWERS), _power_kind),
        (_any_of(names, MEANS), _mean_kind),
        (_any_of(names, ("scaled_dot_product",), within=True), _attention_kind),
    )
    for applies, kind in checks:
        if applies:
            return kind(op)
    return _overflow_kind(op)


def _any_of(names: tuple[str, ...], wanted: tuple[str, ...], *, within: bool = False) -> bool:
    if within:
        return any(word in name for name in names for word in wanted)
    return any(name in wanted for name in names)


def _softmax_kind(op: TracedOp) -> OriginKind:
    if any(value.infs for value in op.inputs):
        return OriginKind.SOFTMAX_MASKED
    return _mean_kind(op)


def _attention_kind(op: TracedOp) -> OriginKind:
    return _overflow_kind(op) if op.has_posinf and not op.has_nan else OriginKind.SOFTMAX_MASKED


def _log_kind(op: TracedOp) -> OriginKind:
    return OriginKind.LOG_OF_NEGATIVE if op.has_nan and _lowest(op) < 0 else OriginKind.LOG_OF_ZERO


def _division_kind(op: TracedOp) -> OriginKind:
    by_zero = op.args in ("0", "0.0", "-0.0") or (bool(op.inputs) and op.inputs[-1].zeros > 0)
    if not by_zero:
        return _overflow_kind(op)
    module = "" if op.site is None else f"{op.site.module} {op.site.module_type}".lower()
    return OriginKind.ATTENTION_ZERO if op.has_nan and "att" in module else OriginKind.DIVISION_BY_ZERO


def _root_kind(op: TracedOp) -> OriginKind:
    if op.has_nan and _lowest(op) < 0:
        return OriginKind.SQRT_OF_NEGATIVE
    return OriginKind.DIVISION_BY_ZERO if "rsqrt" in op.name else _overflow_kind(op)


def _power_kind(op: TracedOp) -> OriginKind:
    if op.args.startswith("-") and any(value.zeros for value in op.inputs):
        return OriginKind.DIVISION_BY_ZERO
    if op.has_nan and _lowest(op) < 0:
        return OriginKind.SQRT_OF_NEGATIVE
    return _half_or(op, OriginKind.SQUARE_OVERFLOW)


def _mean_kind(op: TracedOp) -> OriginKind:
    nothing = any(0 in value.shape for value in op.inputs)
    if op.name.startswith("nll_loss") or nothing:
        return OriginKind.EMPTY_MEAN if op.has_nan else OriginKind.LOG_OF_ZERO
    return _overflow_kind(op)


def _overflow_kind(op: TracedOp) -> OriginKind:
    if any(value.infs for value in op.inputs) or (op.has_nan and not any(value.infs for value in op.outputs)):
        return OriginKind.INVALID
    return _half_or(op, _square_or_overflow(op))


def _square_or_overflow(op: TracedOp) -> OriginKind:
    same = op.name == "mul" and len(op.inputs) == 1
    return OriginKind.SQUARE_OVERFLOW if same else OriginKind.OVERFLOW


def _half_or(op: TracedOp, kind: OriginKind) -> OriginKind:
    return OriginKind.FLOAT16_OVERFLOW if any(value.dtype == "float16" for value in op.outputs) else kind


def _kind_in_backward(op: TracedOp, forward: TracedOp) -> OriginKind:
    name, function = forward.name.strip("_"), "" if forward.site is None else forward.site.function
    at_zero = any(value.zeros for value in (forward.inputs + forward.outputs or op.inputs))
    names = (name, function)
    checks = (
        (_any_of(names, NORM_FUNCTIONS), OriginKind.NORM_AT_ZERO),
        (_any_of(names, NORMS, within=True), OriginKind.ZERO_VARIANCE),
        (at_zero and _any_of(names, (*ROOTS, *POWERS)), OriginKind.SQRT_AT_ZERO),
        (at_zero and _any_of(names, ("div", "reciprocal")), OriginKind.DIVISION_BY_ZERO),
        (at_zero and _any_of(names, LOGS), OriginKind.LOG_OF_ZERO),
        (_any_of(names, STEEP), OriginKind.INFINITE_SLOPE),
        (_any_of(names, EXPS), OriginKind.EXP_OVERFLOW),
    )
    return next((kind for applies, kind in checks if applies), _overflow_kind(op))


def _lowest(op: TracedOp) -> float:
    lows = [value.min for value in op.inputs]
    return min((low for low in lows if low == low), default=0.0)

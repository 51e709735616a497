"""Checks of the optimizer state: non-finite or impossible moments, bad learning rates, a collapsed loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable

from surefoot.inspect.checkpoint_finding import CheckpointFinding, list_names, make_finding
from surefoot.inspect.contents import CheckpointContents, ParamState
from surefoot.inspect.tensor_stats import TensorRole, TensorStats, role_of
from surefoot.logs.log_diagnosis import RunHealth
from surefoot.records import Cause, Pattern

_NOT_TRAINED = (TensorRole.BUFFER, TensorRole.RUNNING_STAT)
ParamStateStats = list[tuple[ParamState, dict[str, TensorStats]]]
_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_avg_sq_row", "exp_avg_sq_col")
"""Running means of squared gradients, by the names optimizers use; they are never negative."""
_MAX_SECOND_MOMENT = 1e30
_RESET_OPTIMIZER = ("Reset the optimizer (keep the weights, drop its state), and warm the learning rate up again.",)


def name_param_states(contents: CheckpointContents) -> None:
    """Replace parameter indices by weight names, if counts and all shapes match the weights in order."""
    trained = [tensor for tensor in contents.weights if role_of(tensor) not in _NOT_TRAINED]
    params = contents.optimizer_state
    if len(params) != len(trained) or any(not param.key.isdecimal() for param in params):
        return
    pairs = list(zip(sorted(params, key=lambda param: int(param.key)), trained, strict=True))
    if all(tensor.shape == weight.shape for param, weight in pairs for tensor in param.tensors.values()):
        for param, weight in pairs:
            param.key = weight.name


def nonfinite_state(contents: CheckpointContents, state_stats: ParamStateStats) -> CheckpointFinding | None:
    bad = [
        f"{name} of {param.key}: {stats.nonfinite:,} of {stats.count:,} values are NaN or Inf"
        for param, by_name in state_stats
        for name, stats in by_name.items()
        if stats.nonfinite
    ]
    if not bad:
        return None
    return make_finding(
        RunHealth.FAILED,
        f"The optimizer state has NaN or Inf in {len(bad):,} of its tensors. The next update spreads them.",
        Cause.OPTIMIZER_STATE,
        confidence=0.9,
        evidence=bad[:8],
        advice=("Use an earlier checkpoint.", *_RESET_OPTIMIZER),
        pattern=Pattern.NONFINITE,
    )


def impossible_second_moments(contents: CheckpointContents, state_stats: ParamStateStats) -> CheckpointFinding | None:
    """Second moments that are negative or above 1e30."""
    wrong = [
        f"{name} of {param.key}: from {stats.min:.3g} to {stats.max:.3g}"
        for param, by_name in state_stats
        for name, stats in by_name.items()
        if name in _SECOND_MOMENTS and not stats.nonfinite and (stats.min < 0 or stats.max > _MAX_SECOND_MOMENT)
    ]
    if not wrong:
        return None
    return make_finding(
        RunHealth.FAILED if any(": from -" in line for line in wrong) else RunHealth.WARNING,
        f"Second moments are impossible in {len(wrong):,} optimizer tensors: a mean of squares is never negative and"
        " never this large.",
        Cause.OPTIMIZER_STATE,
        confidence=0.9,
        evidence=wrong[:8],
        advice=("Use an earlier checkpoint.", *_RESET_OPTIMIZER),
    )


def params_without_gradient(contents: CheckpointContents, state_stats: ParamStateStats) -> CheckpointFinding | None:
    """Parameters whose gradient was always exactly zero."""
    measured = [(param, stats) for param, by_name in state_stats if (stats := _second_moment(by_name)) is not None]
    zero = [param.key for param, stats in measured if stats.is_constant and stats.max == 0]
    if not zero or not any(param.step is None or param.step > 0 for param, _ in measured):
        return None
    message = (
        f"{len(zero):,} of {len(measured):,} parameters have second moments of exactly 0: they never got a gradient"
    )
    if len(zero) <= len(measured) / 2:
        contents.notes.append(f"{message} ({list_names(zero, 5)})")
        return None
    return make_finding(
        RunHealth.WARNING,
        message + ".",
        Cause.NOT_UPDATING,
        confidence=0.8,
        advice=("Check that these parameters are used in the loss and not cut off by detach() or no_grad().",),
    )


def _second_moment(by_name: dict[str, TensorStats]) -> TensorStats | None:
    return next((by_name[name] for name in _SECOND_MOMENTS if name in by_name), None)


def bad_lr(contents: CheckpointContents, state_stats: ParamStateStats) -> CheckpointFinding | None:
    groups = [(group["lr"], group) for group in contents.param_groups if "lr" in group]
    if not groups:
        return None
    advice = ("Check the schedule, and whether it counts steps or epochs.",)
    wrong = [lr for lr, _ in groups if not math.isfinite(lr) or lr < 0]
    huge = [lr for lr, group in groups if lr > (10.0 if "beta2" in group else 100.0)]
    if wrong or huge:
        verdict = RunHealth.FAILED if wrong else RunHealth.WARNING
        sentence = f"The optimizer's learning rate is {(wrong or huge)[0]:g}."
        return make_finding(verdict, sentence, Cause.LEARNING_RATE, confidence=0.9, advice=advice)
    zero = [group for lr, group in groups if lr == 0]
    if zero and len(zero) == len(groups) and not any(group.get("initial_lr", 0) > 0 for group in zero):
        sentence = "The optimizer's learning rate is 0 in every group, and no schedule explains it."
        return make_finding(RunHealth.WARNING, sentence, Cause.NOT_UPDATING, confidence=0.6, advice=advice)
    if zero:
        contents.notes.append(
            f"the learning rate is 0 in {len(zero)} of {len(groups)} parameter groups, as at the end of a schedule"
        )
    return None


def collapsed_loss_scale(contents: CheckpointContents, state_stats: ParamStateStats) -> CheckpointFinding | None:
    value = contents.loss_scale
    if value is None or (math.isfinite(value) and value >= 1):
        return None
    return make_finding(
        RunHealth.WARNING if value > 0 else RunHealth.FAILED,
        f"The float16 loss scale has collapsed to {value:.3g}: update after update was skipped.",
        Cause.PRECISION_OVERFLOW,
        confidence=0.9,
        advice=("Use bfloat16.", "Look for the first NaN in the loss itself: no loss scale helps against it."),
        pattern=Pattern.OVERFLOW_SKIPS,
    )


def note_step_counters(contents: CheckpointContents) -> None:
    """Note step counters that disagree; this is no finding, as experts and late layers step less often."""
    steps = [param.step for param in contents.optimizer_state if param.step is not None]
    finite = [step for step in steps if math.isfinite(step)]
    if finite and min(finite) != max(finite):
        behind = sum(step < max(finite) for step in finite)
        contents.notes.append(
            f"the optimizer's step counters disagree: {behind:,} of {len(finite):,} parameters are behind"
            f" {max(finite):,.0f}, down to {min(finite):,.0f}"
        )
    if contents.step is None and finite:
        contents.step = int(max(finite))
    tensors = [item for param in contents.optimizer_state for item in param.tensors.items()]
    dtypes = {tensor.dtype for name, tensor in tensors if name in _SECOND_MOMENTS}
    if halves := dtypes & {"float16", "bfloat16"}:
        contents.notes.append(
            f"second moments are stored in {list_names(sorted(halves))}, which rounds small ones to 0"
        )


OPTIMIZER_CHECKS: tuple[Callable[[CheckpointContents, ParamStateStats], CheckpointFinding | None], ...] = (
    nonfinite_state, impossible_second_moments, bad_lr, collapsed_loss_scale, params_without_gradient,
)  # fmt: skip

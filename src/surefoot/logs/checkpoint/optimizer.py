"""What is wrong with an optimizer's memory: moments that are no numbers, rates that cannot be, a collapsed scale."""

from __future__ import annotations

import math
from collections.abc import Callable

from surefoot.logs.answer import RunHealth
from surefoot.logs.checkpoint.figures import Figures
from surefoot.logs.checkpoint.finding import Finding, finding, listed
from surefoot.logs.checkpoint.held import Contents, Moments
from surefoot.logs.checkpoint.roles import Role, role_of
from surefoot.records import Cause, Pattern

_NOT_TRAINED = (Role.BUFFER, Role.MEASURED)
Measured = list[tuple[Moments, dict[str, Figures]]]
_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_avg_sq_row", "exp_avg_sq_col")
"""Means of squares, by the names that optimizers give them; they are never negative."""
_ASTRONOMIC = 1e30
_FRESH = ("Start the optimizer afresh (keep the weights, leave its state out), with a short warm-up.",)


def name_moments(contents: Contents) -> None:
    """Optimizers number their parameters; where shapes agree all along, the numbers stand for the weights in order."""
    trained = [held for held in contents.weights if role_of(held) not in _NOT_TRAINED]
    moments = contents.moments
    if len(moments) != len(trained) or any(not one.key.isdecimal() for one in moments):
        return
    pairs = list(zip(sorted(moments, key=lambda one: int(one.key)), trained, strict=True))
    if all(held.shape == whole.shape for one, whole in pairs for held in one.tensors.values()):
        for one, whole in pairs:
            one.key = whole.name


def broken(contents: Contents, measured: Measured) -> Finding | None:
    bad = [
        f"{name} of {moments.key}: {figures.bad:,} of {figures.count:,} values are NaN or Inf"
        for moments, all_figures in measured
        for name, figures in all_figures.items()
        if figures.bad
    ]
    if not bad:
        return None
    return finding(
        RunHealth.FAILED,
        f"The optimizer's state is broken: NaN or Inf in {len(bad):,} of its tensors. The next step spreads them.",
        Cause.OPTIMIZER_STATE,
        confidence=0.9,
        evidence=bad[:8],
        advice=("Take an earlier checkpoint.", *_FRESH),
        pattern=Pattern.NONFINITE,
    )


def impossible(contents: Contents, measured: Measured) -> Finding | None:
    """Second moments below zero or beyond all measure."""
    wrong = [
        f"{name} of {moments.key}: from {figures.low:.3g} to {figures.high:.3g}"
        for moments, all_figures in measured
        for name, figures in all_figures.items()
        if name in _SECOND and not figures.bad and (figures.low < 0 or figures.high > _ASTRONOMIC)
    ]
    if not wrong:
        return None
    return finding(
        RunHealth.FAILED if any(": from -" in one for one in wrong) else RunHealth.WARNING,
        f"Second moments are impossible in {len(wrong):,} tensors of the optimizer: a mean of squares is never"
        " negative, and never astronomic.",
        Cause.OPTIMIZER_STATE,
        confidence=0.9,
        evidence=wrong[:8],
        advice=("Take an earlier checkpoint.", *_FRESH),
    )


def idle(contents: Contents, measured: Measured) -> Finding | None:
    """Parameters whose gradient was always exactly zero."""
    seen = [(moments, figures) for moments, all_figures in measured if (figures := _second(all_figures)) is not None]
    still = [moments.key for moments, figures in seen if figures.constant and figures.high == 0]
    if not still or not any(moments.step is None or moments.step > 0 for moments, _ in seen):
        return None
    told = f"{len(still):,} of {len(seen):,} parameters have second moments of exactly 0: no gradient ever reached them"
    if len(still) <= len(seen) / 2:
        contents.notes.append(f"{told} ({listed(still, 5)})")
        return None
    return finding(
        RunHealth.WARNING,
        told + ".",
        Cause.NOT_UPDATING,
        confidence=0.8,
        advice=("Are these parameters part of the loss, and not cut off by detach() or no_grad()?",),
    )


def _second(all_figures: dict[str, Figures]) -> Figures | None:
    return next((all_figures[name] for name in _SECOND if name in all_figures), None)


def rates(contents: Contents, measured: Measured) -> Finding | None:
    found = [(group["lr"], group) for group in contents.groups if "lr" in group]
    if not found:
        return None
    advice = ("Look at the schedule, and at the units: per step or per epoch.",)
    wrong = [rate for rate, _ in found if not math.isfinite(rate) or rate < 0]
    wild = [rate for rate, group in found if rate > (10.0 if "beta2" in group else 100.0)]
    if wrong or wild:
        state = RunHealth.FAILED if wrong else RunHealth.WARNING
        sentence = f"The optimizer's learning rate is {(wrong or wild)[0]:g}."
        return finding(state, sentence, Cause.LEARNING_RATE, confidence=0.9, advice=advice)
    zero = [group for rate, group in found if rate == 0]
    if zero and len(zero) == len(found) and not any(group.get("initial_lr", 0) > 0 for group in zero):
        sentence = "The optimizer's learning rate is 0 in every group, and no schedule is to be seen that ended there."
        return finding(RunHealth.WARNING, sentence, Cause.NOT_UPDATING, confidence=0.6, advice=advice)
    if zero:
        contents.notes.append(
            f"the learning rate is 0 in {len(zero)} of {len(found)} groups, as at the end of a schedule"
        )
    return None


def scale(contents: Contents, measured: Measured) -> Finding | None:
    value = contents.scale
    if value is None or (math.isfinite(value) and value >= 1):
        return None
    return finding(
        RunHealth.WARNING if value > 0 else RunHealth.FAILED,
        f"The loss scale of float16 has collapsed to {value:.3g}: step after step was skipped.",
        Cause.PRECISION_OVERFLOW,
        confidence=0.9,
        advice=("Use bfloat16.", "Look for the first NaN in the loss itself: no scale helps against it."),
        pattern=Pattern.OVERFLOW_SKIPS,
    )


def counters(contents: Contents) -> None:
    """Step counters that disagree are told, not judged: experts and late layers step less often."""
    steps = [moments.step for moments in contents.moments if moments.step is not None]
    whole = [step for step in steps if math.isfinite(step)]
    if whole and min(whole) != max(whole):
        few = sum(step < max(whole) for step in whole)
        contents.notes.append(
            f"the optimizer's step counters disagree: {few:,} of {len(whole):,} parameters are behind"
            f" {max(whole):,.0f}, down to {min(whole):,.0f}"
        )
    if contents.step is None and whole:
        contents.step = int(max(whole))
    dtypes = {held.dtype for moments in contents.moments for name, held in moments.tensors.items() if name in _SECOND}
    if halves := dtypes & {"float16", "bfloat16"}:
        contents.notes.append(
            f"second moments are kept in {listed(sorted(halves))}, which rounds small ones to nothing"
        )


CHECKS: tuple[Callable[[Contents, Measured], Finding | None], ...] = (broken, impossible, rates, scale, idle)

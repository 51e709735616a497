"""From what was found to a ranked list of causes: rules in the order in which they are surest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from surefoot.judge.diagnose.case import Case
from surefoot.judge.diagnose.roles import Role, role_of
from surefoot.records import Cause, Pattern, Verdict

Named = tuple[Cause, float, str]
"""A cause, how sure it is, and why in words."""


MOST = 300.0
"""Micro-batches that somebody may have forgotten to divide by; beyond that it was a division by next to nothing."""


def causes(case: Case) -> list[Named]:
    """Every cause that the case speaks for, the surest first; never empty."""
    found: dict[Cause, Named] = {}
    for rule in RULES:
        for cause, sure, why in rule(case):
            if cause not in found or found[cause][1] < sure:
                found[cause] = (cause, sure, why)
    ranked = sorted(found.values(), key=lambda named: -named[1])
    return ranked or [(Cause.UNKNOWN, 0.1, "nothing in the numbers tells why")]


def _resources(case: Case) -> Iterator[Named]:
    if case.found("memory"):
        yield Cause.MEMORY_LEAK, 0.9, "memory grows without a pause"
    for finding in case.found("pace", "bottleneck"):
        if finding.evidence.get("data"):
            yield Cause.DATA_STARVATION, 0.9, "steps wait for their data"


def _settings(case: Case) -> Iterator[Named]:
    for finding in case.found("settings"):
        if "momentum" in finding.evidence:
            yield Cause.MOMENTUM, 0.95, finding.detail
        elif finding.evidence.get("early"):
            yield Cause.SCHEDULE, 0.9, "the rate was not warmed up"
        elif "before" in finding.evidence:
            yield Cause.PLATEAU, 0.8, finding.detail
        else:
            yield Cause.LEARNING_RATE, 0.9, finding.detail
            if finding.evidence["at_once"] > 2:
                yield Cause.SCHEDULE, 0.7, "the rate changed from one step to the next"


def _start(case: Case) -> Iterator[Named]:
    for finding in case.found("start"):
        yield Cause.INITIALISATION, 0.6, finding.detail


def _still(case: Case) -> Iterator[Named]:
    for finding in case.found("still"):
        yield Cause.NOT_UPDATING, 0.9, finding.detail


def _loss_scale(case: Case) -> Iterator[Named]:
    for finding in case.found("loss_scale"):
        if finding.pattern is Pattern.OVERFLOW_SKIPS:
            yield Cause.PRECISION_OVERFLOW, 0.85, finding.detail
        else:
            yield Cause.PRECISION_UNDERFLOW, 0.85, finding.detail


def _nonfinite(case: Case) -> Iterator[Named]:
    """Whose fault a value is that is not finite."""
    at = next((m for m in case.moments if m.row.verdict is Verdict.NONFINITE), None)
    if at is None:
        return
    before = case.moments[: case.moments.index(at)]
    if any(m.norm_ratio > 1 or m.z > 8 or m.row.verdict is Verdict.OUTLANDISH for m in before):
        return  # it grew into this: the growth tells more
    if at.row.rank >= 0:
        yield Cause.RANK_FAULT, 0.9, f"only process {at.row.rank} brought it"
    if at.row.bad_weights > 0:
        yield Cause.WEIGHTS_DAMAGED, 0.8, "the weights themselves are not finite"
    if not math.isnan(at.row.loss_scale):
        yield Cause.PRECISION_OVERFLOW, 0.8, "float16 holds nothing above 65504"
    if math.isinf(at.row.loss):
        yield Cause.LOG_OF_ZERO, 0.7, "the loss is infinite, as a log of 0 or a division by 0 makes it"
        yield Cause.BAD_BATCH, 0.5, "the batch may hold an infinite value"
    elif math.isfinite(at.row.loss):
        yield Cause.TRANSIENT, 0.7, "the loss is sound, and the gradients are not: something broke on the way back"
    elif case.refused >= 3:
        yield Cause.WEIGHTS_DAMAGED, 0.6, "batch after batch is not finite: it is not the batches"
        if case.attention:
            yield Cause.LOGIT_GROWTH, 0.4, "attention's logits may have grown beyond all bounds"
    elif case.attention:
        yield Cause.ATTENTION_MASK, 0.6, "a row of attention with nothing to attend to is not a number"
        yield Cause.ZERO_VARIANCE, 0.4, "a normalisation over no variance is not a number"
        yield Cause.BAD_BATCH, 0.3, "the batch may hold what is not a number"
    else:
        yield Cause.BAD_BATCH, 0.6, "the batch brought it, and the next ones did not"


def _batch(case: Case) -> Iterator[Named]:
    """Batches that became tiny, under a norm over the batch."""
    now = case.last.row.samples
    if case.normed and now <= 4 and now < case.samples:
        yield Cause.ZERO_VARIANCE, 0.85, f"batch norm works over {now:.0f} samples, where there were {case.samples:.0f}"


def _leap(case: Case) -> Iterator[Named]:
    """What made the numbers leap from one step to the next."""
    if not case.found("jump", "outlandish") or case.found("settings", "loss_scale"):
        return
    first, after = case.first, case.moments[1:]
    lasts = bool(after) and sum(m.z > 4 or not m.row.landed for m in after) > len(after) / 2
    alike = first.factor > 2.5
    if first.norm_ratio > math.log(4) and first.z < 4:
        yield Cause.TRANSIENT, 0.6, "the gradients leapt and the loss did not"
        if first.attended > 1.0:
            yield Cause.LOGIT_GROWTH, 0.65, "attention's gradients leapt furthest, and the loss did not"
    level = after[-1].z / first.z if after and first.z > 0 else 0.0
    many = alike and lasts and level > 0.3 and first.factor < MOST
    if many and not case.adaptive:
        yield Cause.ACCUMULATION, 0.75, "loss and all gradients were multiplied by one factor, and stay so"
    if alike and not many:
        yield Cause.LOG_OF_ZERO, 0.66, "loss and all gradients have one factor: divided by next to nothing"
    if first.z > 8 and not lasts:
        yield Cause.BAD_BATCH, 0.65, "one batch stood out, and those after it did not"
    if first.z > 8 and lasts:
        falls = after[-1].z < first.z / 3 and after[-1].row.landed
        if falls:
            yield Cause.BAD_BATCH, 0.55, "one batch stood out furthest, and left its mark on the weights"
        if first.row.loss < 1.4 * case.start:
            yield Cause.LABELS, 0.52, "the loss is that of a run that knows nothing: labels or data are others"
        if first.lead > 1.0 and not falls:
            yield Cause.INPUT_SCALE, 0.53, "the first layers' gradients leapt furthest: the input is another one"
        yield Cause.WEIGHTS_DAMAGED, 0.5, "the loss leapt on an ordinary batch and stays: the weights are others"
    if first.row.verdict is Verdict.OUTLANDISH:
        yield Cause.BAD_BATCH, 0.4, "one batch may have brought it"


def _update(case: Case) -> Iterator[Named]:
    """The update before the first sign was too large, at its rate: it is not the rate."""
    if case.update > 1 and not case.found("settings"):
        why = f"an update was {case.update:.3g} times larger than usual, at the same rate, before the first sign"
        remembers = case.adaptive or case.last.row.momentum >= 0.8
        yield Cause.OPTIMIZER_STATE, 0.7 if remembers else 0.4, why
        yield Cause.EXPLODING_GRADIENT, 0.4 if remembers else 0.7, why


def _layers(case: Case) -> Iterator[Named]:
    for finding in case.found("dead", "vanishing"):
        roles = [role_of(name) for name in finding.evidence["layers"]]
        if roles and all(role is Role.ATTENTION for role in roles):
            yield Cause.ATTENTION_MASK, 0.65, f"{finding.detail}: attention has nothing to choose from"
    if case.found("dead"):
        yield Cause.DEAD_UNITS, 0.58, case.found("dead")[0].detail
    if case.found("vanishing"):
        share = case.found("vanishing")[0].evidence["share"]
        yield Cause.VANISHING_GRADIENT, 0.7 if share > 0.25 else 0.45, case.found("vanishing")[0].detail
    if case.found("exploding"):
        yield Cause.EXPLODING_GRADIENT, 0.45, case.found("exploding")[0].detail


def _shape(case: Case) -> Iterator[Named]:
    for finding in case.findings:
        if finding.pattern is Pattern.EXPONENTIAL:
            yield Cause.LEARNING_RATE, 0.4, "growth that feeds on itself: a rate too large, or a momentum too high"
        elif finding.pattern is Pattern.OSCILLATING:
            yield Cause.OSCILLATION, 0.33, "swings that widen: a wrong second moment, or a rate too large"
        elif finding.pattern is Pattern.OVERFIT:
            yield Cause.OVERFITTING, 0.6, "the loss falls as if the same few batches came again and again"
        elif finding.pattern is Pattern.PLATEAU:
            yield Cause.PLATEAU, 0.4, finding.detail
            yield Cause.INITIALISATION, 0.3, "the run has never got under way"


def _level(case: Case) -> Iterator[Named]:
    if case.found("level"):
        yield Cause.LABELS, 0.35, "the loss is higher from here on, and the gradients are sound: labels or data changed"
        yield Cause.DRIFT, 0.3, "the data may have moved"


RULES: tuple[Callable[[Case], Iterator[Named]], ...] = (
    _resources,
    _settings,
    _start,
    _still,
    _loss_scale,
    _nonfinite,
    _batch,
    _leap,
    _update,
    _layers,
    _shape,
    _level,
)

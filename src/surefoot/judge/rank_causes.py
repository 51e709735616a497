"""From what was found to a ranked list of causes: rules in the order in which they are surest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from surefoot.judge.incident import Incident, IncidentStep
from surefoot.judge.param_roles import Role, role_of
from surefoot.judge.policy import AGAIN, CLEARLY, DOUBLE, FEW, HUGE, MICRO_BATCHES, PART
from surefoot.records import Cause, Pattern, Verdict

Named = tuple[Cause, float, str]
"""A cause, how sure it is, and why in words."""


def rank_causes(case: Incident) -> list[Named]:
    """Every cause that the case speaks for, the surest first; never empty."""
    found: dict[Cause, Named] = {}
    for rule in RULES:
        for cause, sure, why in rule(case):
            if cause not in found or found[cause][1] < sure:
                found[cause] = (cause, sure, why)
    ranked = sorted(found.values(), key=lambda named: -named[1])
    return ranked or [(Cause.UNKNOWN, 0.1, "nothing in the numbers tells why")]


def _resources(case: Incident) -> Iterator[Named]:
    if case.found("memory"):
        yield Cause.MEMORY_LEAK, 0.9, "memory grows without a pause"
    for finding in case.found("pace", "bottleneck"):
        if finding.evidence.get("data"):
            yield Cause.DATA_STARVATION, 0.9, "steps wait for their data"


def _settings(case: Incident) -> Iterator[Named]:
    for finding in case.found("settings"):
        if "momentum" in finding.evidence:
            yield Cause.MOMENTUM, 0.95, finding.detail
        elif finding.evidence.get("early"):
            yield Cause.SCHEDULE, 0.9, "the rate was not warmed up"
        elif "before" in finding.evidence:
            yield Cause.PLATEAU, 0.8, finding.detail
        else:
            yield Cause.LEARNING_RATE, 0.9, finding.detail
            if finding.evidence["at_once"] > DOUBLE:
                yield Cause.SCHEDULE, 0.7, "the rate changed from one step to the next"
    if case.first.rate_ratio > DOUBLE and case.found("level", "jump", "growth", "oscillation"):
        yield Cause.LEARNING_RATE, 0.7, f"the rate is {case.first.rate_ratio:.3g} times what it usually was"


def _start(case: Incident) -> Iterator[Named]:
    for finding in case.found("start"):
        yield Cause.INITIALISATION, 0.6, finding.detail


def _still(case: Incident) -> Iterator[Named]:
    for finding in case.found("still"):
        if "unchanged_fraction" in finding.evidence:
            yield Cause.PRECISION_UNDERFLOW, 0.85, finding.detail
        else:
            yield Cause.NOT_UPDATING, 0.9, finding.detail


def _loop(case: Incident) -> Iterator[Named]:
    """What the loop does to the gradients, or has stopped doing."""
    for finding in case.found("stale_grads"):
        yield Cause.ACCUMULATION, 0.93, finding.detail
    for finding in case.found("lost_clip"):
        lost = finding.evidence["times"] > 1
        yield Cause.EXPLODING_GRADIENT if lost else Cause.NOT_UPDATING, 0.92, finding.detail


def _inputs(case: Incident) -> Iterator[Named]:
    """Batches of another kind: one, a few, or all from here on."""
    for finding in case.found("inputs"):
        if finding.evidence.get("slowly"):
            yield Cause.DRIFT, 0.86, finding.detail
    strange = [m.strange >= 1 for m in case.moments]
    if not any(strange):
        return
    why = next((f.detail for f in case.found("inputs")), "the batch is unlike those before")
    since = strange[strange.index(True) :]
    if not all(since):
        yield Cause.BAD_BATCH, 0.84, f"{why}; others after it are as ever"
    elif len(since) > AGAIN:
        yield Cause.INPUT_SCALE, 0.84, f"{why}; so are all since"
    else:
        yield Cause.BAD_BATCH, 0.6, why
        yield Cause.INPUT_SCALE, 0.55, why


def _evaluation(case: Incident) -> Iterator[Named]:
    """Held-out data tells what the batches just seen cannot."""
    for finding in case.found("evaluation"):
        if finding.evidence["apart"] and case.attention and not case.found("repeats"):
            yield Cause.ATTENTION_MASK, 0.62, f"{finding.detail}: attention may see what it is to foretell"
        elif not finding.evidence["apart"]:
            yield Cause.LABELS, 0.32, finding.detail


def _weights(case: Incident) -> Iterator[Named]:
    """The weights are others than training has made them; the surer, the more the loss tells of it."""
    for finding in case.found("weights"):
        yield Cause.WEIGHTS_DAMAGED, 0.5, finding.detail
    signs = case.found("level", "jump", "nonfinite", "dead", "vanishing")
    another = case.found("settings") or case.update > 1 or any(m.strange >= 1 for m in case.moments)
    if not abs(case.weights) > 0 or not signs or another:
        return
    times = math.exp(min(case.weights, 700.0))
    by = f"the norm of the weights is {times:.3g} times what it was, which no update explains"
    last = case.moments[-1]
    if case.found("dead") or last.silent > PART:
        yield Cause.DEAD_UNITS, 0.765, f"{by}, and units have fallen silent"
    if case.found("vanishing") or (case.weights < 0 and last.lead < -1):
        yield Cause.VANISHING_GRADIENT, 0.79, f"{by}, and less gradient comes through to the first layers"
    silent = [name for f in case.found("dead", "vanishing") for name in f.evidence["layers"]]
    attention = bool(silent) and all(role_of(name) is Role.ATTENTION for name in silent)
    if attention or abs(max((m.attended for m in case.moments), key=abs)) > 1:
        yield Cause.LOGIT_GROWTH, 0.77, f"{by}, and attention's gradients have changed most"
    if case.first.z > case.sight.raised or not case.first.norm_ratio > math.log(case.sight.jump):
        yield Cause.WEIGHTS_DAMAGED, 0.76, by


def _replicas(case: Incident) -> Iterator[Named]:
    for finding in case.found("replicas"):
        yield Cause.RANK_FAULT, 0.98, finding.detail


def _loss_scale(case: Incident) -> Iterator[Named]:
    for finding in case.found("loss_scale"):
        if finding.pattern is Pattern.OVERFLOW_SKIPS:
            yield Cause.PRECISION_OVERFLOW, 0.85, finding.detail
        else:
            yield Cause.PRECISION_UNDERFLOW, 0.85, finding.detail


def _nonfinite(case: Incident) -> Iterator[Named]:
    """Whose fault a value is that is not finite."""
    at = next((m for m in case.moments if m.row.verdict is Verdict.NONFINITE), None)
    if at is None:
        return
    before = case.moments[: case.moments.index(at)]
    if any(m.norm_ratio > 1 or m.z > case.sight.far or m.row.verdict is Verdict.NORM_OUTLIER for m in before):
        return  # it grew into this: the growth tells more
    yield from _located(case, at)
    if not math.isnan(at.row.loss_scale):
        yield Cause.PRECISION_OVERFLOW, 0.8, "float16 holds nothing above 65504"
    if math.isinf(at.row.loss):
        yield Cause.LOG_OF_ZERO, 0.7, "the loss is infinite, as a log of 0 or a division by 0 makes it"
        yield Cause.BAD_BATCH, 0.5, "the batch may hold an infinite value"
    elif at.row.nonfinite_buffers > 0 and math.isfinite(at.row.loss) and math.isfinite(at.row.norm):
        yield Cause.BAD_BATCH, 0.8, "loss and gradients are finite, and a buffer of the model is not after this batch"
    elif math.isfinite(at.row.loss):
        yield from _made_in_backward(case)
    elif case.refused >= AGAIN:
        yield Cause.WEIGHTS_DAMAGED, 0.6, "batch after batch is not finite: it is not the batches"
        if case.attention:
            yield Cause.LOGIT_GROWTH, 0.4, "attention's logits may have grown beyond all bounds"
    elif case.attention:
        yield Cause.ATTENTION_MASK, 0.38, "a row of attention with nothing to attend to is not a number"
        yield Cause.ZERO_VARIANCE, 0.34, "a normalisation over no variance is not a number"
        yield Cause.BAD_BATCH, 0.3, "the batch may hold what is not a number"
    else:
        yield Cause.BAD_BATCH, 0.38, "the batch brought it, and the next ones did not"


def _made_in_backward(case: Incident) -> Iterator[Named]:
    """The loss is finite and gradients are not.

    A bad value that an operation makes in backward is passed on to all tensors before it; one tensor alone, with sound
    ones before it, was written to from elsewhere.
    """
    bad = [m for m in case.moments if m.row.verdict is Verdict.NONFINITE and math.isfinite(m.row.loss)]
    times = "one update" if len(bad) == 1 else f"{len(bad)} updates"
    known = f"the loss of {times} was finite and gradients were not: they became non-finite in the backward pass"
    if all(m.one_bad_tensor for m in bad):
        yield Cause.TRANSIENT, 0.6, f"{known}, in one tensor alone, while the layers before it got finite gradients"
        return
    at_zero = f"{known}; sqrt, norm and division at 0 have no finite derivative"
    passing = len(bad) == 1
    yield Cause.LOG_OF_ZERO, 0.3 if passing else 0.4, at_zero
    yield Cause.TRANSIENT, 0.4 if passing else 0.3, known


def _located(case: Incident, at: IncidentStep) -> Iterator[Named]:
    """Where the value was found."""
    if at.row.rank >= 0:
        yield Cause.RANK_FAULT, 0.97, f"only process {at.row.rank} brought it"
    if any(f.evidence.get("broken") for f in case.found("inputs")):
        yield Cause.BAD_BATCH, 0.95, "the batch itself holds values that are not finite"
    for finding in case.found("origin"):
        cause = Cause(finding.evidence["cause"])
        yield cause, 0.9 if cause is not Cause.UNKNOWN else 0.1, finding.detail  # where is known, why is not
    if at.row.nonfinite_params > 0:
        yield Cause.WEIGHTS_DAMAGED, 0.8, "the weights themselves are not finite"


def _batch(case: Incident) -> Iterator[Named]:
    """Batches that became tiny, under a norm over the batch."""
    now = case.last.row.samples
    if case.normed and now <= FEW and now < case.samples:
        yield Cause.ZERO_VARIANCE, 0.85, f"batch norm works over {now:.0f} samples, where there were {case.samples:.0f}"


def _leap(case: Incident) -> Iterator[Named]:
    """What made the numbers leap from one step to the next."""
    if not case.found("jump", "norm_outlier") or case.found("settings", "loss_scale"):
        return
    first, after = case.first, case.moments[1:]
    lasts = bool(after) and sum(m.z > case.sight.raised or not m.row.applied for m in after) > len(after) / 2
    lasts = lasts or bool(case.found("level"))
    alike = first.factor > DOUBLE
    if first.norm_ratio > math.log(case.sight.jump) and first.z < case.sight.raised:
        yield Cause.TRANSIENT, 0.6, "the gradients leapt and the loss did not"
        if first.attended > 1.0 or (case.attention and case.weights > 0):
            yield Cause.LOGIT_GROWTH, 0.65, "attention's gradients leapt furthest or its weights grew; the loss did not"
    ordinary = not math.isnan(first.row.input_absmax) and first.strange < 1
    if ordinary and after and first.row.loss > max(HUGE * case.normal, 2 * after[0].row.loss):
        yield Cause.LOG_OF_ZERO, 0.67, "the loss leapt and fell back while the inputs were ordinary: a division"
    level = after[-1].z / first.z if after and first.z > 0 else 0.0
    many = alike and lasts and level > PART and first.factor < MICRO_BATCHES
    if many and not case.adaptive:
        yield Cause.ACCUMULATION, 0.75, "loss and all gradients were multiplied by one factor, and stay so"
    if alike and not many:
        yield Cause.LOG_OF_ZERO, 0.66, "loss and all gradients have one factor: divided by next to nothing"
    if first.z > case.sight.far and not lasts:
        yield Cause.BAD_BATCH, 0.65, "one batch stood out, and those after it did not"
    if first.z > case.sight.far and lasts and after:
        yield from _lasting_leap(case)
    if first.row.verdict is Verdict.NORM_OUTLIER:
        yield Cause.BAD_BATCH, 0.4, "one batch may have brought it"


def _lasting_leap(case: Incident) -> Iterator[Named]:
    """The loss leapt at once and is still high."""
    first, soon = case.first, case.moments[1:][:AGAIN][-1]
    falls = soon.z < first.z / AGAIN and soon.row.applied
    if falls:
        yield Cause.BAD_BATCH, 0.55, "one batch stood out furthest, and left its mark on the weights"
    if case.weights == 0 and not falls:
        yield Cause.LABELS, 0.62, "the weights are what they were, and so are the inputs: labels are others"
    elif first.row.loss < CLEARLY * case.start:
        yield Cause.LABELS, 0.52, "the loss is that of a run that knows nothing: labels or data are others"
    if first.lead > 1.0 and not falls and math.isnan(first.row.input_absmax):  # else it was looked at
        yield Cause.INPUT_SCALE, 0.53, "the first layers' gradients leapt furthest: the input is another one"
    yield Cause.WEIGHTS_DAMAGED, 0.5, "the loss leapt on an ordinary batch and stays: the weights are others"


def _update(case: Incident) -> Iterator[Named]:
    """The update before the first sign was too large, at its rate: it is not the rate."""
    if case.update > 1 and not case.found("settings"):
        why = f"an update was {case.update:.3g} times larger than usual, at the same rate, before the first sign"
        remembers = case.adaptive or case.last.row.momentum >= 1 - PART
        yield Cause.OPTIMIZER_STATE, 0.8 if remembers else 0.4, why
        yield Cause.EXPLODING_GRADIENT, 0.4 if remembers else 0.7, why


def _layers(case: Incident) -> Iterator[Named]:
    for finding in case.found("dead", "vanishing"):
        roles = [role_of(name) for name in finding.evidence["layers"]]
        if roles and all(role is Role.ATTENTION for role in roles):
            yield Cause.ATTENTION_MASK, 0.65, f"{finding.detail}: attention has nothing to choose from"
    if case.found("dead"):
        yield Cause.DEAD_UNITS, 0.58, case.found("dead")[0].detail
    if case.found("vanishing"):
        share = case.found("vanishing")[0].evidence["share"]
        yield Cause.VANISHING_GRADIENT, 0.7 if share > PART else 0.45, case.found("vanishing")[0].detail
    if case.found("exploding"):
        yield Cause.EXPLODING_GRADIENT, 0.45, case.found("exploding")[0].detail


def _shape(case: Incident) -> Iterator[Named]:
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


def _level(case: Incident) -> Iterator[Named]:
    if case.found("level"):
        yield Cause.LABELS, 0.35, "the loss is higher from here on, and the gradients are sound: labels or data changed"
        yield Cause.DRIFT, 0.3, "the data may have moved"


RULES: tuple[Callable[[Incident], Iterator[Named]], ...] = (
    _resources,
    _settings,
    _start,
    _still,
    _loop,
    _inputs,
    _evaluation,
    _weights,
    _replicas,
    _loss_scale,
    _nonfinite,
    _batch,
    _leap,
    _update,
    _layers,
    _shape,
    _level,
)

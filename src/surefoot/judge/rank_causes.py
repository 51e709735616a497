"""Ranks the causes that an incident's findings and numbers point to; the rules with the surest evidence come first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from surefoot.judge.incident import Incident, IncidentStep
from surefoot.judge.param_roles import Role, role_of
from surefoot.judge.thresholds import (
    CLEAR_RATIO,
    DOUBLE_RATIO,
    HUGE_RATIO,
    MAX_MICROBATCHES,
    NOTABLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
)
from surefoot.records import Cause, Pattern, Verdict

RankedCause = tuple[Cause, float, str]
"""A cause, its confidence, and the reason in words."""


def rank_causes(incident: Incident) -> list[RankedCause]:
    """Every cause that the incident points to, the most confident first; never empty."""
    best: dict[Cause, RankedCause] = {}
    for rule in RULES:
        for cause, confidence, reason in rule(incident):
            if cause not in best or best[cause][1] < confidence:
                best[cause] = (cause, confidence, reason)
    ranked = sorted(best.values(), key=lambda ranked_cause: -ranked_cause[1])
    return ranked or [(Cause.UNKNOWN, 0.1, "nothing in the numbers shows why")]


def _resources(incident: Incident) -> Iterator[RankedCause]:
    if incident.found("memory_growth"):
        yield Cause.MEMORY_LEAK, 0.9, "memory grows steadily"
    for finding in incident.found("slow_steps", "idle_device"):
        if finding.evidence.get("data"):
            yield Cause.DATA_STARVATION, 0.9, "steps wait for their data"


def _hyperparams(incident: Incident) -> Iterator[RankedCause]:
    for finding in incident.found("hyperparam_change"):
        if "momentum" in finding.evidence:
            yield Cause.MOMENTUM, 0.95, finding.detail
        elif finding.evidence.get("early"):
            yield Cause.SCHEDULE, 0.9, "the learning rate was not warmed up"
        elif "before" in finding.evidence:
            yield Cause.PLATEAU, 0.8, finding.detail
        else:
            yield Cause.LEARNING_RATE, 0.9, finding.detail
            if finding.evidence["at_once"] > DOUBLE_RATIO:
                yield Cause.SCHEDULE, 0.7, "the learning rate changed from one step to the next"
    lr_ratio = incident.first.lr_ratio
    if lr_ratio > DOUBLE_RATIO and incident.found("loss_level", "jump", "growth", "oscillation"):
        yield Cause.LEARNING_RATE, 0.7, f"the learning rate is {lr_ratio:.3g} times its usual value"


def _initial_grads(incident: Incident) -> Iterator[RankedCause]:
    for finding in incident.found("large_initial_grads"):
        yield Cause.INITIALISATION, 0.6, finding.detail


def _frozen_weights(incident: Incident) -> Iterator[RankedCause]:
    for finding in incident.found("frozen_weights"):
        if "unchanged_fraction" in finding.evidence:
            yield Cause.PRECISION_UNDERFLOW, 0.85, finding.detail
        else:
            yield Cause.NOT_UPDATING, 0.9, finding.detail


def _training_loop(incident: Incident) -> Iterator[RankedCause]:
    """What the loop does to the gradients, or has stopped doing."""
    for finding in incident.found("stale_grads"):
        yield Cause.ACCUMULATION, 0.93, finding.detail
    for finding in incident.found("clipping_changed"):
        looser = finding.evidence["times"] > 1
        yield Cause.EXPLODING_GRADIENT if looser else Cause.NOT_UPDATING, 0.92, finding.detail


def _inputs(incident: Incident) -> Iterator[RankedCause]:
    """Different batches: one, a few, or all from here on."""
    for finding in incident.found("input_shift"):
        if finding.evidence.get("slowly"):
            yield Cause.DRIFT, 0.86, finding.detail
    novel = [step.input_novelty >= 1 for step in incident.steps]
    if not any(novel):
        return
    reason = next((f.detail for f in incident.found("input_shift")), "the batch is unlike those before")
    since = novel[novel.index(True) :]
    if not all(since):
        yield Cause.BAD_BATCH, 0.84, f"{reason}; later batches are normal again"
    elif len(since) > REPEAT_COUNT:
        yield Cause.INPUT_SCALE, 0.84, f"{reason}; so are all since"
    else:
        yield Cause.BAD_BATCH, 0.6, reason
        yield Cause.INPUT_SCALE, 0.55, reason


def _evaluation(incident: Incident) -> Iterator[RankedCause]:
    """The eval loss shows what training batches cannot."""
    for finding in incident.found("eval_rise"):
        overfits = finding.evidence["apart"]
        if overfits and incident.has_attention and not incident.found("repeated_batches"):
            yield Cause.ATTENTION_MASK, 0.62, f"{finding.detail}: attention may see the tokens it is to predict"
        elif not overfits:
            yield Cause.LABELS, 0.32, finding.detail


def _weights(incident: Incident) -> Iterator[RankedCause]:
    """The weights changed by more than training explains; the more the loss shows it, the surer."""
    for finding in incident.found("weight_jump"):
        yield Cause.WEIGHTS_DAMAGED, 0.5, finding.detail
    signs = incident.found("loss_level", "jump", "nonfinite", "dead_units", "vanishing_grads")
    novel = any(step.input_novelty >= 1 for step in incident.steps)
    explained = incident.found("hyperparam_change") or incident.update_excess > 1 or novel
    if not abs(incident.weight_change) > 0 or not signs or explained:
        return
    ratio = math.exp(min(incident.weight_change, 700.0))
    reason = f"the norm of the weights is {ratio:.3g} times what it was, which no update explains"
    last = incident.last
    if incident.found("dead_units") or last.silent_fraction > NOTABLE_FRACTION:
        yield Cause.DEAD_UNITS, 0.765, f"{reason}, and units have gone dead"
    if incident.found("vanishing_grads") or (incident.weight_change < 0 and last.front_layers_lead < -1):
        yield Cause.VANISHING_GRADIENT, 0.79, f"{reason}, and less gradient reaches the first layers"
    silent = [name for f in incident.found("dead_units", "vanishing_grads") for name in f.evidence["layers"]]
    attention = bool(silent) and all(role_of(name) is Role.ATTENTION for name in silent)
    if attention or abs(max((step.attention_lead for step in incident.steps), key=abs)) > 1:
        yield Cause.LOGIT_GROWTH, 0.77, f"{reason}, and attention's gradients changed most"
    first, thresholds = incident.first, incident.thresholds
    if first.z > thresholds.level_sigmas or not first.log_norm_ratio > math.log(thresholds.norm_jump_ratio):
        yield Cause.WEIGHTS_DAMAGED, 0.76, reason


def _replicas(incident: Incident) -> Iterator[RankedCause]:
    for finding in incident.found("replicas"):
        yield Cause.RANK_FAULT, 0.98, finding.detail


def _loss_scale(incident: Incident) -> Iterator[RankedCause]:
    for finding in incident.found("loss_scale"):
        if finding.pattern is Pattern.OVERFLOW_SKIPS:
            yield Cause.PRECISION_OVERFLOW, 0.85, finding.detail
        else:
            yield Cause.PRECISION_UNDERFLOW, 0.85, finding.detail


def _nonfinite(incident: Incident) -> Iterator[RankedCause]:
    """Where a non-finite value comes from."""
    step = next((step for step in incident.steps if step.row.verdict is Verdict.NONFINITE), None)
    if step is None:
        return
    if any(_has_grown(earlier, incident) for earlier in incident.steps[: incident.steps.index(step)]):
        return  # the values grew into it: other rules explain the growth
    yield from _located(incident, step)
    row = step.row
    if not math.isnan(row.loss_scale):
        yield Cause.PRECISION_OVERFLOW, 0.8, "float16 overflows above 65504"
    if math.isinf(row.loss):
        yield Cause.LOG_OF_ZERO, 0.7, "the loss is infinite, as after log(0) or a division by 0"
        yield Cause.BAD_BATCH, 0.5, "the batch may contain an infinite value"
    elif row.nonfinite_buffers > 0 and math.isfinite(row.loss) and math.isfinite(row.norm):
        yield Cause.BAD_BATCH, 0.8, "loss and gradients are finite, but a buffer of the model is not after this batch"
    elif math.isfinite(row.loss):
        yield from _made_in_backward(incident)
    elif incident.refused >= REPEAT_COUNT:
        yield Cause.WEIGHTS_DAMAGED, 0.6, f"{incident.refused} batches in a row are non-finite: it is not the batches"
        if incident.has_attention:
            yield Cause.LOGIT_GROWTH, 0.4, "attention's logits may have grown without bound"
    elif incident.has_attention:
        yield Cause.ATTENTION_MASK, 0.38, "softmax over a fully masked attention row is NaN"
        yield Cause.ZERO_VARIANCE, 0.34, "normalising values without variance gives NaN"
        yield Cause.BAD_BATCH, 0.3, "the batch may contain NaN"
    else:
        yield Cause.BAD_BATCH, 0.38, "this batch was non-finite, and the next ones were not"


def _has_grown(step: IncidentStep, incident: Incident) -> bool:
    high = step.log_norm_ratio > 1 or step.z > incident.thresholds.loss_jump_sigmas
    return high or step.row.verdict is Verdict.NORM_OUTLIER


def _made_in_backward(incident: Incident) -> Iterator[RankedCause]:
    """The loss is finite and gradients are not.

    A bad value made by an operation in backward spreads to all tensors before it; a single bad tensor, with finite ones
    before it, was written to from elsewhere.
    """
    bad = [s for s in incident.steps if s.row.verdict is Verdict.NONFINITE and math.isfinite(s.row.loss)]
    updates = "one update" if len(bad) == 1 else f"{len(bad)} updates"
    reason = f"in {updates} the loss was finite and gradients were not: they became non-finite in the backward pass"
    if all(step.one_bad_tensor for step in bad):
        yield Cause.TRANSIENT, 0.6, f"{reason}, in one tensor alone, while the layers before it got finite gradients"
        return
    single = len(bad) == 1
    at_zero = f"{reason}; sqrt, norm and division at 0 have no finite derivative"
    yield Cause.LOG_OF_ZERO, 0.3 if single else 0.4, at_zero
    yield Cause.TRANSIENT, 0.4 if single else 0.3, reason


def _located(incident: Incident, step: IncidentStep) -> Iterator[RankedCause]:
    """The rank, batch, module or weight that the value was found in."""
    if step.row.rank >= 0:
        yield Cause.RANK_FAULT, 0.97, f"only rank {step.row.rank} has non-finite values"
    if any(f.evidence.get("broken") for f in incident.found("input_shift")):
        yield Cause.BAD_BATCH, 0.95, "the batch itself contains non-finite values"
    for finding in incident.found("origin"):
        cause = Cause(finding.evidence["cause"])
        yield cause, 0.9 if cause is not Cause.UNKNOWN else 0.1, finding.detail  # the place is known, the cause is not
    if step.row.nonfinite_params > 0:
        yield Cause.WEIGHTS_DAMAGED, 0.8, "the weights themselves are not finite"


def _batch_size(incident: Incident) -> Iterator[RankedCause]:
    """Batches that became tiny, under batch norm."""
    samples, usual = incident.last.row.samples, incident.usual_batch_size
    if incident.has_batch_norm and samples <= RECENT_ROWS and samples < usual:
        yield Cause.ZERO_VARIANCE, 0.85, f"batch norm gets {samples:.0f} samples per batch, where it got {usual:.0f}"


def _jump(incident: Incident) -> Iterator[RankedCause]:
    """What made loss or gradients jump from one step to the next."""
    if not incident.found("jump", "norm_outlier") or incident.found("hyperparam_change", "loss_scale"):
        return
    first, after, thresholds = incident.first, incident.steps[1:], incident.thresholds
    high = sum(step.z > thresholds.level_sigmas or not step.row.applied for step in after)
    lasts = (bool(after) and high > len(after) / 2) or bool(incident.found("loss_level"))
    if first.log_norm_ratio > math.log(thresholds.norm_jump_ratio) and first.z < thresholds.level_sigmas:
        yield Cause.TRANSIENT, 0.6, "the gradients jumped and the loss did not"
        if first.attention_lead > 1.0 or (incident.has_attention and incident.weight_change > 0):
            reason = "attention's gradients jumped furthest or its weights grew; the loss did not jump"
            yield Cause.LOGIT_GROWTH, 0.65, reason
    ordinary_inputs = not math.isnan(first.row.input_absmax) and first.input_novelty < 1
    if ordinary_inputs and after and first.row.loss > max(HUGE_RATIO * incident.normal_loss, 2 * after[0].row.loss):
        reason = "the loss jumped and fell back while the inputs were ordinary: a division by nearly zero"
        yield Cause.LOG_OF_ZERO, 0.67, reason
    rescaled = first.loss_factor > DOUBLE_RATIO
    level = after[-1].z / first.z if after and first.z > 0 else 0.0
    accumulated = rescaled and lasts and level > NOTABLE_FRACTION and first.loss_factor < MAX_MICROBATCHES
    if accumulated and not incident.adaptive:
        reason = f"loss and all gradients were multiplied by {first.loss_factor:.3g}, and stay so"
        yield Cause.ACCUMULATION, 0.75, reason
    if rescaled and not accumulated:
        reason = f"loss and all gradients were multiplied by {first.loss_factor:.3g}: divided by nearly zero"
        yield Cause.LOG_OF_ZERO, 0.66, reason
    if first.z > thresholds.loss_jump_sigmas and not lasts:
        yield Cause.BAD_BATCH, 0.65, "one batch stood out, and those after it did not"
    if first.z > thresholds.loss_jump_sigmas and lasts and after:
        yield from _lasting_jump(incident)
    if first.row.verdict is Verdict.NORM_OUTLIER:
        yield Cause.BAD_BATCH, 0.4, "a single batch may have caused it"


def _lasting_jump(incident: Incident) -> Iterator[RankedCause]:
    """The loss jumped at once and is still high."""
    first, soon = incident.first, incident.steps[1:][:REPEAT_COUNT][-1]
    falls = soon.z < first.z / REPEAT_COUNT and soon.row.applied
    if falls:
        yield Cause.BAD_BATCH, 0.55, "one batch stood out furthest, and its update damaged the weights"
    if incident.weight_change == 0 and not falls:
        yield Cause.LABELS, 0.62, "weights and inputs are unchanged, so the labels must have changed"
    elif first.row.loss < CLEAR_RATIO * incident.start_loss:
        yield Cause.LABELS, 0.52, "the loss is back at that of an untrained model: labels or data changed"
    if first.front_layers_lead > 1.0 and not falls and math.isnan(first.row.input_absmax):  # else inputs were measured
        yield Cause.INPUT_SCALE, 0.53, "the first layers' gradients jumped furthest: the inputs changed"
    yield Cause.WEIGHTS_DAMAGED, 0.5, "the loss jumped on an ordinary batch and stays high: the weights changed"


def _excess_update(incident: Incident) -> Iterator[RankedCause]:
    """The update before the first finding was too large for its lr: it is not the lr."""
    if incident.update_excess > 1 and not incident.found("hyperparam_change"):
        reason = f"an update was {incident.update_excess:.3g} times larger than usual, at the same learning rate"
        has_state = incident.adaptive or incident.last.row.momentum >= 1 - NOTABLE_FRACTION
        yield Cause.OPTIMIZER_STATE, 0.8 if has_state else 0.4, reason
        yield Cause.EXPLODING_GRADIENT, 0.4 if has_state else 0.7, reason


def _layers(incident: Incident) -> Iterator[RankedCause]:
    for finding in incident.found("dead_units", "vanishing_grads"):
        roles = [role_of(name) for name in finding.evidence["layers"]]
        if roles and all(role is Role.ATTENTION for role in roles):
            yield Cause.ATTENTION_MASK, 0.65, f"{finding.detail}: attention has nothing to attend to"
    for finding in incident.found("dead_units")[:1]:
        yield Cause.DEAD_UNITS, 0.58, finding.detail
    for finding in incident.found("vanishing_grads")[:1]:
        many = finding.evidence["share"] > NOTABLE_FRACTION
        yield Cause.VANISHING_GRADIENT, 0.7 if many else 0.45, finding.detail
    for finding in incident.found("exploding_grads")[:1]:
        yield Cause.EXPLODING_GRADIENT, 0.45, finding.detail


def _pattern(incident: Incident) -> Iterator[RankedCause]:
    for finding in incident.findings:
        if finding.pattern is Pattern.EXPONENTIAL:
            yield Cause.LEARNING_RATE, 0.4, "exponential growth: the learning rate or momentum is too high"
        elif finding.pattern is Pattern.OSCILLATING:
            yield Cause.OSCILLATION, 0.33, "widening swings: a wrong second moment, or too high a learning rate"
        elif finding.pattern is Pattern.OVERFIT:
            yield Cause.OVERFITTING, 0.6, "the loss falls as if the same few batches came again and again"
        elif finding.pattern is Pattern.PLATEAU:
            yield Cause.PLATEAU, 0.4, finding.detail
            yield Cause.INITIALISATION, 0.3, "the run has never begun to learn"


def _level(incident: Incident) -> Iterator[RankedCause]:
    if incident.found("loss_level"):
        yield Cause.LABELS, 0.35, "the loss stays higher, and the gradients are sound: labels or data changed"
        yield Cause.DRIFT, 0.3, "the data may have drifted"


RULES: tuple[Callable[[Incident], Iterator[RankedCause]], ...] = (
    _resources,
    _hyperparams,
    _initial_grads,
    _frozen_weights,
    _training_loop,
    _inputs,
    _evaluation,
    _weights,
    _replicas,
    _loss_scale,
    _nonfinite,
    _batch_size,
    _jump,
    _excess_update,
    _layers,
    _pattern,
    _level,
)

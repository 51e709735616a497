"""What speaks for each cause, and how much: one table, and one function that evaluates it.

A confidence is how sure a clue alone makes its cause; of several clues for one cause the surest counts. Clues with the
surest evidence come first: of equally likely causes the one that was named first leads. The confidences are fitted to
recorded runs by `surefoot bench causes`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

from surefoot.judge.case_facts import CaseFacts, Nonfinite
from surefoot.judge.cause_confidences import CONFIDENCES
from surefoot.judge.clues import Clue, clue_names, found, shape
from surefoot.judge.evidence import (
    ClippingEvidence,
    EarlyEvidence,
    EvalRiseEvidence,
    InputDrift,
    LrDropped,
    LrRaised,
    MomentumRaised,
    NovelBatch,
    OriginEvidence,
    RoundedUpdates,
    SmallUpdates,
    StillTensors,
    TimeEvidence,
)
from surefoot.judge.incident import Incident
from surefoot.judge.thresholds import DOUBLE_RATIO
from surefoot.records import Cause, Pattern
from surefoot.records import FindingKind as Kind

RankedCause = tuple[Cause, float, str]
"""A cause, its confidence, and the reason in words."""
TRIAL_CONFIDENCE = 0.95
"""Of a cause that a trial has shown."""


def rank_causes(incident: Incident) -> list[RankedCause]:
    """Every cause that the incident points to, the most confident first; never empty."""
    case = CaseFacts(incident)
    best: dict[Cause, RankedCause] = {}
    for kinds, clues in CLUES_BY_FINDING:
        for finding in incident.found(*kinds) if kinds else (case.NO_FINDING,):
            case.finding = finding
            for clue in clues:
                known = best.get(clue.cause)
                if (known is None or known[1] < clue.confidence) and clue.when(case):
                    best[clue.cause] = (clue.cause, clue.confidence, clue.reason.format(case=case))
    ranked = sorted(best.values(), key=lambda ranked_cause: -ranked_cause[1])
    return ranked or [(Cause.UNKNOWN, 0.1, "nothing in the numbers shows why")]


CHANGED = "the norm of the weights is {case.weights_ratio:.3g} times what it was, which no update explains"
AT_ZERO = "{case.backward}; sqrt, norm and division at 0 have no finite derivative"
MULTIPLIED = "loss and all gradients were multiplied by {case.first.loss_factor:.3g}"
SAMPLES = "batch norm gets {case.last.row.samples:.0f} samples per batch, where it got {case.usual_samples:.0f}"
EXCESS = "an update was {case.incident.update_excess:.3g} times larger than usual, at the same learning rate"

TYPED_CLUES: tuple[Clue, ...] = (
    found(Kind.MEMORY_GROWTH, Cause.MEMORY_LEAK, 0.9, reason="memory grows steadily"),
    found(TimeEvidence, Cause.DATA_STARVATION, 0.9, lambda held: held.data, "steps wait for their data"),
    found(TimeEvidence, Cause.LAUNCH_BOUND, 0.8, lambda held: held.bottleneck == "launches"),
    found(TimeEvidence, Cause.SLOW_SAVING, 0.85, lambda held: held.bottleneck == "saving"),
    found(TimeEvidence, Cause.SLOW_MACHINE, 0.6, lambda held: not held.data and not held.bottleneck),
    # -- hyperparameters
    found(MomentumRaised, Cause.MOMENTUM, 0.95),
    found(LrDropped, Cause.SCHEDULE, 0.9, lambda held: held.early, "the learning rate was not warmed up"),
    found(LrDropped, Cause.PLATEAU, 0.8, lambda held: not held.early),
    found(LrRaised, Cause.LEARNING_RATE, 0.9),
    found(
        LrRaised,
        Cause.SCHEDULE,
        0.7,
        lambda held: held.at_once > DOUBLE_RATIO,
        "the learning rate changed from one step to the next",
    ),
    Clue(
        Cause.LEARNING_RATE,
        0.7,
        "the learning rate is {case.first.lr_ratio:.3g} times its usual value",
        lambda c: c.suffers_from_lr,
    ),
    found(EarlyEvidence, Cause.LEARNING_RATE, 0.93, lambda held: held.violent),
    # -- the weights do not learn, or the loop does something to the gradients, or has stopped doing it
    found(Kind.LARGE_INITIAL_GRADS, Cause.INITIALISATION, 0.6),
    found(RoundedUpdates, Cause.PRECISION_UNDERFLOW, 0.85),
    found(SmallUpdates, Cause.NOT_UPDATING, 0.9),
    found(StillTensors, Cause.NOT_UPDATING, 0.9),
    found(Kind.STALE_GRADS, Cause.ACCUMULATION, 0.93),
    found(ClippingEvidence, Cause.EXPLODING_GRADIENT, 0.92, lambda held: held.times > 1),
    found(ClippingEvidence, Cause.NOT_UPDATING, 0.92, lambda held: not held.times > 1),
    # -- different batches: one, a few, or all from here on
    found(NovelBatch, Cause.DRIFT, 0.86, lambda held: held.slowly),
    found(InputDrift, Cause.DRIFT, 0.86, lambda held: held.slowly),
    Clue(Cause.BAD_BATCH, 0.84, "{case.novelty}; later batches are normal again", lambda c: c.novelty_passed),
    Clue(Cause.INPUT_SCALE, 0.84, "{case.novelty}; so are all since", lambda c: c.novelty_stays),
    Clue(Cause.BAD_BATCH, 0.6, "{case.novelty}", lambda c: c.novelty_open),
    Clue(Cause.INPUT_SCALE, 0.55, "{case.novelty}", lambda c: c.novelty_open),
    # -- the eval loss shows what training batches cannot
    Clue(
        Cause.ATTENTION_MASK,
        0.62,
        "{case.finding.detail}: attention may see the tokens it is to predict",
        lambda c: c.may_see_targets,
        EvalRiseEvidence.kinds,
    ),
    found(EvalRiseEvidence, Cause.LABELS, 0.32, lambda held: not held.apart),
    # -- the weights changed by more than training explains; the more the loss shows it, the surer
    found(Kind.WEIGHT_JUMP, Cause.WEIGHTS_DAMAGED, 0.5),
    Clue(Cause.DEAD_UNITS, 0.765, f"{CHANGED}, and units have gone dead", lambda c: c.units_went_dead),
    Clue(
        Cause.VANISHING_GRADIENT,
        0.79,
        f"{CHANGED}, and less gradient reaches the first layers",
        lambda c: c.first_layers_starve,
    ),
    Clue(
        Cause.LOGIT_GROWTH,
        0.77,
        f"{CHANGED}, and attention's gradients changed most",
        lambda c: c.attention_changed_most,
    ),
    Clue(Cause.WEIGHTS_DAMAGED, 0.76, CHANGED, lambda c: c.weights_changed and (c.loss_is_high or not c.norm_jumped)),
    found(Kind.REPLICAS, Cause.RANK_FAULT, 0.98),
    Clue(
        Cause.PRECISION_OVERFLOW,
        0.85,
        "{case.finding.detail}",
        lambda c: c.finding.pattern is Pattern.OVERFLOW_SKIPS,
        (Kind.LOSS_SCALE,),
    ),
    Clue(
        Cause.PRECISION_UNDERFLOW,
        0.85,
        "{case.finding.detail}",
        lambda c: c.finding.pattern is not Pattern.OVERFLOW_SKIPS,
        (Kind.LOSS_SCALE,),
    ),
    # -- the rank, batch, module or weight that a non-finite value came from, unless it grew
    Clue(
        Cause.RANK_FAULT,
        0.97,
        "only rank {case.bad_row.rank} has non-finite values",
        lambda c: c.nonfinite is not None and c.bad_row.rank >= 0,
    ),
    Clue(
        Cause.BAD_BATCH,
        0.95,
        "the batch itself contains non-finite values",
        lambda c: c.nonfinite is not None and c.batch_is_broken,
    ),
    *(  # where the place is known and the cause is not, nothing speaks for one
        Clue(
            cause,
            0.1 if cause is Cause.UNKNOWN else 0.9,
            "{case.finding.detail}",
            lambda c, cause=cause: c.nonfinite is not None and c.origin is cause,
            OriginEvidence.kinds,
        )
        for cause in Cause
    ),
    Clue(
        Cause.WEIGHTS_DAMAGED,
        0.8,
        "the weights themselves are not finite",
        lambda c: c.nonfinite is not None and c.bad_row.nonfinite_params > 0,
    ),
    Clue(
        Cause.PRECISION_OVERFLOW,
        0.8,
        "float16 overflows above 65504",
        lambda c: c.nonfinite is not None and not math.isnan(c.bad_row.loss_scale),
    ),
    Clue(
        Cause.LOG_OF_ZERO,
        0.7,
        "the loss is infinite, as after log(0) or a division by 0",
        lambda c: c.nonfinite is Nonfinite.INFINITE_LOSS,
    ),
    Clue(
        Cause.BAD_BATCH,
        0.5,
        "the batch may contain an infinite value",
        lambda c: c.nonfinite is Nonfinite.INFINITE_LOSS,
    ),
    Clue(
        Cause.BAD_BATCH,
        0.8,
        "loss and gradients are finite, but a buffer of the model is not after this batch",
        lambda c: c.nonfinite is Nonfinite.BUFFER,
    ),
    # A bad value made by an operation in backward spreads to all tensors before it; a single bad tensor, with finite
    # ones before it, was written to from elsewhere.
    Clue(
        Cause.TRANSIENT,
        0.6,
        "{case.backward}, in one tensor alone, while the layers before it got finite gradients",
        lambda c: c.nonfinite is Nonfinite.ONE_GRADIENT,
    ),
    Clue(Cause.LOG_OF_ZERO, 0.3, AT_ZERO, lambda c: c.nonfinite is Nonfinite.GRADIENTS),
    Clue(Cause.LOG_OF_ZERO, 0.4, AT_ZERO, lambda c: c.nonfinite is Nonfinite.GRADIENTS and not c.once),
    Clue(Cause.TRANSIENT, 0.3, "{case.backward}", lambda c: c.nonfinite is Nonfinite.GRADIENTS),
    Clue(Cause.TRANSIENT, 0.4, "{case.backward}", lambda c: c.nonfinite is Nonfinite.GRADIENTS and c.once),
    Clue(
        Cause.WEIGHTS_DAMAGED,
        0.6,
        "{case.incident.refused} batches in a row are non-finite: it is not the batches",
        lambda c: c.nonfinite is Nonfinite.EVERY_BATCH,
    ),
    Clue(
        Cause.LOGIT_GROWTH,
        0.4,
        "attention's logits may have grown without bound",
        lambda c: c.nonfinite is Nonfinite.EVERY_BATCH and c.incident.has_attention,
    ),
    Clue(
        Cause.ATTENTION_MASK,
        0.38,
        "softmax over a fully masked attention row is NaN",
        lambda c: c.nonfinite is Nonfinite.SOME_BATCHES and c.incident.has_attention,
    ),
    Clue(
        Cause.ZERO_VARIANCE,
        0.34,
        "normalising values without variance gives NaN",
        lambda c: c.nonfinite is Nonfinite.SOME_BATCHES and c.incident.has_attention,
    ),
    Clue(
        Cause.BAD_BATCH,
        0.3,
        "the batch may contain NaN",
        lambda c: c.nonfinite is Nonfinite.SOME_BATCHES and c.incident.has_attention,
    ),
    Clue(
        Cause.BAD_BATCH,
        0.38,
        "this batch was non-finite, and the next ones were not",
        lambda c: c.nonfinite is Nonfinite.SOME_BATCHES and not c.incident.has_attention,
    ),
    # -- what made loss or gradients jump from one step to the next
    Clue(Cause.ZERO_VARIANCE, 0.85, SAMPLES, lambda c: c.batches_are_tiny),
    Clue(Cause.TRANSIENT, 0.6, "the gradients jumped and the loss did not", lambda c: c.only_norm_jumped),
    Clue(
        Cause.LOGIT_GROWTH,
        0.65,
        "attention's gradients jumped furthest or its weights grew; the loss did not jump",
        lambda c: c.only_norm_jumped and c.attention_jumped,
    ),
    Clue(
        Cause.LOG_OF_ZERO,
        0.67,
        "the loss jumped and fell back while the inputs were ordinary: a division by nearly zero",
        lambda c: c.fell_back_on_ordinary_inputs,
    ),
    Clue(
        Cause.ACCUMULATION,
        0.75,
        f"{MULTIPLIED}, and stay so",
        lambda c: c.rescaled_for_good and not c.incident.adaptive,
    ),
    Clue(
        Cause.LOG_OF_ZERO,
        0.66,
        f"{MULTIPLIED}: divided by nearly zero",
        lambda c: c.rescaled and not c.rescaled_for_good,
    ),
    Clue(Cause.BAD_BATCH, 0.65, "one batch stood out, and those after it did not", lambda c: c.passing_jump),
    Clue(
        Cause.BAD_BATCH,
        0.55,
        "one batch stood out furthest, and its update damaged the weights",
        lambda c: c.lasting_jump and c.falls,
    ),
    Clue(
        Cause.LABELS,
        0.62,
        "weights and inputs are unchanged, so the labels must have changed",
        lambda c: c.lasting_jump and c.weights_unchanged,
    ),
    Clue(
        Cause.LABELS,
        0.52,
        "the loss is back at that of an untrained model: labels or data changed",
        lambda c: c.lasting_jump and not c.weights_unchanged and c.back_at_start,
    ),
    Clue(
        Cause.INPUT_SCALE,
        0.53,
        "the first layers' gradients jumped furthest: the inputs changed",
        lambda c: c.lasting_jump and c.first_layers_lead,
    ),
    Clue(
        Cause.WEIGHTS_DAMAGED,
        0.5,
        "the loss jumped on an ordinary batch and stays high: the weights changed",
        lambda c: c.lasting_jump,
    ),
    Clue(Cause.BAD_BATCH, 0.4, "a single batch may have caused it", lambda c: c.began_refused),
    # -- the update before the first finding was too large for its lr: it is not the lr
    Clue(Cause.OPTIMIZER_STATE, 0.4, EXCESS, lambda c: c.excess_update),
    Clue(Cause.OPTIMIZER_STATE, 0.8, EXCESS, lambda c: c.excess_update and c.optimizer_has_state),
    Clue(Cause.EXPLODING_GRADIENT, 0.4, EXCESS, lambda c: c.excess_update),
    Clue(Cause.EXPLODING_GRADIENT, 0.7, EXCESS, lambda c: c.excess_update and not c.optimizer_has_state),
    # -- layers
    Clue(
        Cause.ATTENTION_MASK,
        0.65,
        "{case.finding.detail}: attention has nothing to attend to",
        lambda c: c.silent_attention,
        (Kind.DEAD_UNITS, Kind.VANISHING_GRADS),
    ),
    *(  # hints by the part of the model; they name a cause, but decide nothing
        Clue(
            cause,
            0.44,
            "{case.finding.detail}",
            lambda c, cause=cause: c.cause_by_part is cause,
            (Kind.EXPLODING_GRADS, Kind.VANISHING_GRADS),
        )
        for cause in (Cause.INPUT_SCALE, Cause.INITIALISATION)
    ),
    Clue(Cause.ATTENTION_MASK, 0.32, "{case.language_hint}", lambda c: bool(c.language_hint)),
    found(Kind.DEAD_UNITS, Cause.DEAD_UNITS, 0.58),
    Clue(Cause.VANISHING_GRADIENT, 0.45, "{case.vanishing.detail}", lambda c: c.found(Kind.VANISHING_GRADS)),
    Clue(Cause.VANISHING_GRADIENT, 0.7, "{case.vanishing.detail}", lambda c: c.much_vanishes),
    found(Kind.EXPLODING_GRADS, Cause.EXPLODING_GRADIENT, 0.45),
    # -- the shape of the loss alone
    shape(
        Pattern.EXPONENTIAL, Cause.LEARNING_RATE, 0.4, "exponential growth: the learning rate or momentum is too high"
    ),
    shape(
        Pattern.OSCILLATING,
        Cause.OSCILLATION,
        0.33,
        "widening swings: a wrong second moment, or too high a learning rate",
    ),
    shape(Pattern.OVERFIT, Cause.OVERFITTING, 0.6, "the loss falls as if the same few batches came again and again"),
    shape(Pattern.PLATEAU, Cause.PLATEAU, 0.4),
    shape(Pattern.PLATEAU, Cause.INITIALISATION, 0.3, "the run has never begun to learn"),
    Clue(
        Cause.LABELS,
        0.35,
        "the loss stays higher, and the gradients are sound: labels or data changed",
        lambda c: c.found(Kind.LOSS_LEVEL),
    ),
    Clue(Cause.DRIFT, 0.3, "the data may have drifted", lambda c: c.found(Kind.LOSS_LEVEL)),
)
"""Everything that speaks for a cause, with the confidences that the fit starts from."""
CLUES = tuple(
    replace(clue, confidence=CONFIDENCES.get(name, clue.confidence))
    for clue, name in zip(TYPED_CLUES, clue_names(TYPED_CLUES), strict=True)
)
"""The same with the fitted confidences."""
CLUES_BY_FINDING = tuple((kinds, tuple(clues)) for kinds, clues in groupby(CLUES, key=lambda clue: clue.each))
"""Neighbouring clues in the same findings are looked at together, finding by finding."""

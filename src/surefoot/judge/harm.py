"""Decides whether an incident calls for an action: each rule returns its reason in words, or "" for none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from surefoot.judge.evidence import (
    ClippingEvidence,
    JumpEvidence,
    LayersEvidence,
    LevelEvidence,
    LossEvidence,
    LrRaised,
    MomentumRaised,
    NovelBatch,
    RegressionEvidence,
    RescaledEvidence,
)
from surefoot.judge.incident import LOSS_DETECTORS, SILENCE_DETECTORS, Incident
from surefoot.judge.thresholds import (
    CLEAR_RATIO,
    DOUBLE_RATIO,
    HUGE_RATIO,
    NEGLIGIBLE_FRACTION,
    NOTABLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
    SMALL_FRACTION,
    STRONG_RATIO,
    WINDOW_ROWS,
)
from surefoot.records import Finding, Verdict
from surefoot.records import FindingKind as Kind

SUFFERS = (Kind.LOSS_LEVEL, Kind.GROWTH, Kind.JUMP, Kind.OSCILLATION)
"""Detectors of a loss that suffers from something."""


class HarmKind(StrEnum):
    """Why an incident calls for an action."""

    RANKS_DIFFER = "ranks_differ"
    EVAL = "eval_loss_rose"
    STALE_GRADS = "stale_grads"
    CLIPPING_LOST = "clipping_lost"
    SEVERE_FINDING = "severe_finding"
    RESCALED = "rescaled"
    HYPERPARAM = "hyperparam"
    WEIGHTS_DAMAGED = "weights_damaged"
    SILENT_LAYERS = "silent_layers"
    HUGE_UPDATE = "huge_update"
    EXCESS_UPDATE = "excess_update"
    REFUSALS = "many_refusals"


@dataclass(frozen=True, slots=True)
class Harm:
    """The harm that an incident does, and the reason in words."""

    kind: HarmKind
    reason: str


def harm_of(incident: Incident, *, adaptive: bool, clipped: bool) -> Harm | None:
    """Why the incident calls for an action; None when reporting it is enough."""
    tolerant = adaptive or clipped
    for kind, rule in RULES.items():
        if reason := rule(incident, tolerant):
            return Harm(kind, reason)
    return None


def _ranks_differ(incident: Incident, tolerant: bool) -> str:
    """The ranks hold different weights, and were equal before."""
    return next((finding.detail for finding in incident.found(Kind.REPLICAS) if finding.severe), "")


def _severe_finding(incident: Incident, tolerant: bool) -> str:
    """A detector is sure of it."""
    # The loss may only be in another unit, and no worse.
    rescaled = bool(incident.found(Kind.LOSS_RESCALED)) and (tolerant or _compensated(incident))
    ignored = {
        Kind.LOSS_LEVEL: _lr_lowered(incident) or rescaled,
        Kind.JUMP: len(incident.steps) <= REPEAT_COUNT,  # a jump may heal by itself
        Kind.WEIGHT_JUMP: len(incident.steps) <= RECENT_ROWS,  # what follows shows whether it did harm
    }
    severe = (f.detail for f in incident.findings if f.severe and not ignored.get(f.detector, False))
    return next(severe, "")


def _updates_rescaled(incident: Incident, tolerant: bool) -> str:
    """Updates have grown with the gradients: at once, and not because the data changed."""
    rescaled = rescaled_at_onset(incident)
    novel = any(step.input_novelty >= 1 for step in incident.steps)
    return rescaled[0].detail if rescaled and not tolerant and not novel and not _compensated(incident) else ""


def rescaled_at_onset(incident: Incident) -> list[Finding]:
    """Findings that loss and gradients were multiplied when the incident began, neither before nor long after."""
    last = incident.onset + RECENT_ROWS
    return [f for f in incident.found(Kind.LOSS_RESCALED) if incident.onset <= f.attempt <= last]


def _compensated(incident: Incident) -> bool:
    """The learning rate was lowered by as much as the loss was multiplied."""
    _, rescaled = incident.facts(RescaledEvidence)[0]
    return rescaled.factor * incident.last.lr_ratio < DOUBLE_RATIO


def _lr_lowered(incident: Incident) -> bool:
    """The loop lowered the lr by about as much as the level rose: the loss counts more now, on purpose."""
    usual = incident.healthy_lrs[0] if incident.healthy_lrs else math.nan
    ratio = incident.last.row.lr / usual if 0 < usual < math.inf else 1.0
    levels = [held.level for _, held in incident.facts(LevelEvidence)]
    return ratio * DOUBLE_RATIO < 1 and all(level * ratio < DOUBLE_RATIO * incident.normal_loss for level in levels)


def _hyperparam_harm(incident: Incident, tolerant: bool) -> str:
    """Learning rate or momentum were raised, and the run suffers from it."""
    raised = incident.raised
    if not raised:
        return ""
    detail = raised[0][0].detail
    if any(isinstance(held, MomentumRaised) and held.momentum >= 1 for _, held in raised):
        return detail
    by_eval = [finding for finding, held in incident.facts(RegressionEvidence) if held.raised]
    harm = incident.found(*LOSS_DETECTORS) or by_eval
    if harm and not (_loss_falls(incident) and all(f.detector is Kind.GROWTH for f in harm)):
        return f"{detail}, and {harm[0].detail}"
    return f"{detail}, and the loss is no lower for it" if _gains_nothing(incident) else ""


def _loss_falls(incident: Incident) -> bool:
    """At most one of the last losses is not below normal: a run that needed a higher lr may learn at last."""
    return sum(not step.row.loss < incident.normal_loss for step in incident.steps[-RECENT_ROWS:]) <= 1


def raised_without_harm(incident: Incident) -> bool:
    """Lr or momentum were raised in vain, the lr not at once, and no harm came of it: nothing stands out."""
    recent, level_sigmas = incident.steps[-WINDOW_ROWS:], incident.thresholds.level_sigmas
    calm = all(step.z < level_sigmas and step.log_norm_ratio < math.log(DOUBLE_RATIO) for step in recent)
    harm = incident.found(*LOSS_DETECTORS, Kind.JUMP, Kind.EXPLODING_GRADS, Kind.EVAL_REGRESSION)
    at_once = any(held.at_once > STRONG_RATIO for _, held in incident.facts(LrRaised))  # the state before that is near
    return calm and not harm and not at_once and bool(incident.raised) and _gains_nothing(incident)


def _gains_nothing(incident: Incident) -> bool:
    """For 16 rows the lr was far higher and the loss no lower, or the momentum was higher and so was the loss."""
    recent = incident.steps[-WINDOW_ROWS:]
    if len(recent) < WINDOW_ROWS:
        return False
    faster = incident.last.lr_ratio > STRONG_RATIO and all(step.lr_ratio > 1 / STRONG_RATIO for step in recent)
    if faster and sum(step.row.loss for step in recent) / WINDOW_ROWS >= incident.normal_loss:
        return True
    raised = min((held.momentum for _, held in incident.facts(MomentumRaised)), default=math.inf)
    stays_raised = all(step.momentum >= raised for step in recent)
    # The standard error of such a mean is one sigma over the root of its rows.
    return stays_raised and sum(step.z for step in recent) / WINDOW_ROWS > DOUBLE_RATIO / math.sqrt(WINDOW_ROWS)


def _weights_damaged(incident: Incident, tolerant: bool) -> str:
    """Something else than the optimizer has written to the weights, and the loss has risen."""
    changed = abs(incident.weight_change) > math.log(CLEAR_RATIO)
    if not changed or not incident.found(Kind.LOSS_LEVEL, Kind.JUMP) or not _loss_stays_high(incident, 1.0):
        return ""
    ratio = math.exp(min(incident.weight_change, 700.0))
    return f"the norm of the weights is {ratio:.3g} times what it was, which no update explains, and the loss has risen"


def _stale_grads(incident: Incident, tolerant: bool) -> str:
    """Gradients are not zeroed, and have grown beyond their usual size."""
    findings = incident.found(Kind.STALE_GRADS)
    grown = sum(step.log_norm_ratio > 0 for step in incident.steps[-REPEAT_COUNT:]) > REPEAT_COUNT / 2
    harm = grown or incident.found(*SUFFERS)
    return findings[0].detail if findings and harm else ""


def _clipping_lost(incident: Incident, tolerant: bool) -> str:
    """A run that depended on its clipping has lost it, and suffers."""
    lost = [finding for finding, held in incident.facts(ClippingEvidence) if held.times > 1]
    harm = incident.found(*SUFFERS)
    return f"{lost[0].detail}, and {harm[0].detail}" if lost and harm else ""


def _silent_layers(incident: Incident, tolerant: bool) -> str:
    """Layers no longer get gradients, and the loss has risen."""
    silent, levels = incident.found(*SILENCE_DETECTORS), incident.facts(LevelEvidence)
    if not silent or not levels:
        return ""
    share = max(held.share for finding, held in incident.facts(LayersEvidence) if finding in silent)
    after = [finding for finding, held in levels if held.slowly and finding.attempt >= silent[0].attempt]
    slowly = share > SMALL_FRACTION and bool(after)
    sigmas = 1.0 if share > NOTABLE_FRACTION else incident.thresholds.level_sigmas
    if not slowly and not _loss_stays_high(incident, sigmas):
        return ""
    return f"{silent[0].detail}, and {levels[0][0].detail}"


def _huge_update(incident: Incident, tolerant: bool) -> str:
    """A huge update was applied, and the loss has risen since."""
    huge = [finding for finding, held in incident.facts(JumpEvidence) if held.huge]
    level = [f for f in incident.found(Kind.LOSS_LEVEL) if huge and f.attempt > huge[0].attempt]
    lasts = len(incident.steps) > REPEAT_COUNT and _loss_stays_high(incident, incident.thresholds.level_sigmas)
    return f"{huge[0].detail}, and {level[0].detail}" if level and lasts else ""


def _excess_update(incident: Incident, tolerant: bool) -> str:
    """An update was too large for its lr, and the loss has risen since."""
    level = incident.found(Kind.LOSS_LEVEL)
    excess = incident.update_excess
    if not level or not excess > 1 or not _loss_stays_high(incident, incident.thresholds.level_sigmas / 2):
        return ""
    return f"an update was {excess:.3g} times larger than usual at the same learning rate, and {level[0].detail}"


def _loss_stays_high(incident: Incident, sigmas: float) -> bool:
    """Most of the last losses lie this many sigmas above normal: a reported rise may be over by now. Up to one sigma 16
    of them are asked instead of 5, because chance alone brings three of five now and then."""
    last = incident.steps[-RECENT_ROWS if sigmas > 1 else -WINDOW_ROWS :]
    return sum(step.z > sigmas for step in last) >= max(REPEAT_COUNT, 1 + len(last) // 2)


def _refused(incident: Incident, tolerant: bool) -> str:
    """Many refused updates in a row; or repeated infinite losses under loss scaling, which float32 can hold."""
    last = incident.last.row
    loss_is_fine = math.isfinite(last.loss) or last.rank >= 0
    # Few when not even the loss is finite, for then it may be the weights; many when refusing is all that is needed.
    limit = WINDOW_ROWS if loss_is_fine else REPEAT_COUNT
    limit = 2 * REPEAT_COUNT if last.verdict is Verdict.NORM_OUTLIER else limit
    last_detail = incident.findings[-1].detail if incident.findings else ""
    if incident.refused >= limit:
        return f"{incident.refused} updates in a row were refused: {last_detail}"
    recent = incident.steps[-WINDOW_ROWS:]
    infinite = [s for s in recent if s.row.verdict is Verdict.NONFINITE and math.isinf(s.row.loss)]
    # Each of these halves the loss scale, too.
    often = len(infinite) >= REPEAT_COUNT and last is infinite[-1].row and not math.isnan(last.loss_scale)
    return f"{len(infinite)} of {len(recent)} updates were refused: {last_detail}" if often else ""


def _eval_harm(incident: Incident, tolerant: bool) -> str:
    """The training loss misbehaves, and the eval loss shows that it does harm."""
    for regression, held in incident.facts(RegressionEvidence):
        if held.raised:
            continue
        loss_findings = incident.found(*LOSS_DETECTORS, Kind.JUMP)
        between = [f for f in loss_findings if held.well <= f.attempt < regression.attempt]
        signs = [f for f in between if _explains_harm(f, incident, held)]
        signs += [f for f, batch in incident.facts(NovelBatch) if held.well <= f.attempt and _is_other_data(batch)]
        # A single evaluation must be beyond doubt, and the harm must last: a gentle rise may be meant, and may heal.
        beyond_doubt = held.lost or any(f.detector is Kind.JUMP for f in signs)
        if signs and (held.twice or (beyond_doubt and _train_loss_rose_too(held, incident))):
            return f"{regression.detail}, and {signs[0].detail}"
    return ""


def _train_loss_rose_too(regression: RegressionEvidence, incident: Incident) -> bool:
    """The training loss has risen by a good part of what the eval loss has: it is the same harm."""
    recent = sorted(step.row.loss for step in incident.steps[-RECENT_ROWS:])
    rise = recent[len(recent) // 2] - incident.normal_loss
    return _loss_stays_high(incident, 1.0) and rise > NOTABLE_FRACTION * (regression.eval_loss - regression.best)


def _explains_harm(finding: Finding, incident: Incident, regression: RegressionEvidence) -> bool:
    """Whether a finding explains the risen eval loss: a large norm jump, or a loss that rose by more than a negligible
    amount and by a good part of the eval loss's rise (a single loss by half of it).

    A level that only crept up, or is on its way down since, counts only where the harm is great and lasts: batches may
    be harder on purpose, and are then learnt.
    """
    harm, min_rise = regression.eval_loss - regression.best, NEGLIGIBLE_FRACTION * abs(incident.start_loss)
    jump, single = JumpEvidence.read(finding), LossEvidence.read(finding)
    if jump is not None and jump.norm_ratio > math.log(incident.thresholds.large_norm_jump_ratio):
        return True
    if single is not None:
        return single.loss - incident.normal_loss > max(min_rise, harm / DOUBLE_RATIO)
    level = LevelEvidence.read(finding)
    if level is None:
        return False
    level_sigmas = incident.thresholds.level_sigmas
    sudden = level.deviations > level_sigmas or _loss_stays_high(incident, level_sigmas)
    crept = level.slowly or not sudden
    rise, remaining = level.level - level.normal, regression.lately - level.normal
    being_learnt = NOTABLE_FRACTION * rise < remaining < rise / DOUBLE_RATIO
    great = regression.lost or harm > (CLEAR_RATIO - 1) * abs(regression.best)
    counts = not (crept or being_learnt) or (great and regression.twice)
    return counts and rise > max(min_rise, NOTABLE_FRACTION * harm)


def _is_other_data(batch: NovelBatch) -> bool:
    """A batch whose std is ten times the usual one."""
    return batch.spread > HUGE_RATIO * batch.usual


RULES: Mapping[HarmKind, Callable[[Incident, bool], str]] = {
    HarmKind.RANKS_DIFFER: _ranks_differ,
    HarmKind.EVAL: _eval_harm,
    HarmKind.STALE_GRADS: _stale_grads,
    HarmKind.CLIPPING_LOST: _clipping_lost,
    HarmKind.SEVERE_FINDING: _severe_finding,
    HarmKind.RESCALED: _updates_rescaled,
    HarmKind.HYPERPARAM: _hyperparam_harm,
    HarmKind.WEIGHTS_DAMAGED: _weights_damaged,
    HarmKind.SILENT_LAYERS: _silent_layers,
    HarmKind.HUGE_UPDATE: _huge_update,
    HarmKind.EXCESS_UPDATE: _excess_update,
    HarmKind.REFUSALS: _refused,
}
"""Asked in this order; `tolerant` says that the updates do not grow with the gradients (adaptive, or clipped)."""

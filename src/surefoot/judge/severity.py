"""Decides whether an incident calls for an action: each rule returns its reason in words, or "" for none."""

from __future__ import annotations

import math

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


def is_severe(incident: Incident, *, adaptive: bool, clipped: bool) -> str:
    """Why the incident calls for an action, in words; "" when reporting it is enough."""
    tolerant = adaptive or clipped
    return next((reason for rule in RULES if (reason := rule(incident, tolerant))), "")


def _ranks_differ(incident: Incident, tolerant: bool) -> str:
    """The ranks hold different weights, and were equal before."""
    return next((finding.detail for finding in incident.found("replicas") if finding.severe), "")


def _severe_finding(incident: Incident, tolerant: bool) -> str:
    """A detector is sure of it."""
    # The loss may only be in another unit, and no worse.
    rescaled = bool(incident.found("loss_rescaled")) and (tolerant or _compensated(incident))
    ignored = {
        "loss_level": _lr_lowered(incident) or rescaled,
        "jump": len(incident.steps) <= REPEAT_COUNT,  # a jump may heal by itself
        "weight_jump": len(incident.steps) <= RECENT_ROWS,  # what follows shows whether it did harm
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
    return [f for f in incident.found("loss_rescaled") if incident.onset <= f.attempt <= last]


def _compensated(incident: Incident) -> bool:
    """The learning rate was lowered by as much as the loss was multiplied."""
    return incident.found("loss_rescaled")[0].evidence["factor"] * incident.last.lr_ratio < DOUBLE_RATIO


def _lr_lowered(incident: Incident) -> bool:
    """The loop lowered the lr by about as much as the level rose: the loss counts more now, on purpose."""
    usual = incident.healthy_lrs[0] if incident.healthy_lrs else math.nan
    ratio = incident.last.row.lr / usual if 0 < usual < math.inf else 1.0
    levels = [f.evidence["level"] for f in incident.found("loss_level")]
    return ratio * DOUBLE_RATIO < 1 and all(level * ratio < DOUBLE_RATIO * incident.normal_loss for level in levels)


def _hyperparam_harm(incident: Incident, tolerant: bool) -> str:
    """Learning rate or momentum were raised, and the run suffers from it."""
    raised = _raised(incident)
    if any(f.evidence.get("momentum", 0) >= 1 for f in raised):
        return raised[0].detail
    harm = incident.found(*LOSS_DETECTORS) or [f for f in incident.found("eval_regression") if f.evidence["raised"]]
    if raised and harm and not (_loss_falls(incident) and all(f.detector == "growth" for f in harm)):
        return f"{raised[0].detail}, and {harm[0].detail}"
    return f"{raised[0].detail}, and the loss is no lower for it" if raised and _gains_nothing(incident) else ""


def _loss_falls(incident: Incident) -> bool:
    """At most one of the last losses is not below normal: a run that needed a higher lr may learn at last."""
    return sum(not step.row.loss < incident.normal_loss for step in incident.steps[-RECENT_ROWS:]) <= 1


def _raised(incident: Incident) -> list[Finding]:
    """Findings that the learning rate or the momentum was raised."""
    return [f for f in incident.found("hyperparam_change") if "times" in f.evidence or "momentum" in f.evidence]


def raised_without_harm(incident: Incident) -> bool:
    """Lr or momentum were raised in vain, the lr not at once, and no harm came of it: nothing stands out."""
    recent, level_sigmas = incident.steps[-WINDOW_ROWS:], incident.thresholds.level_sigmas
    calm = all(step.z < level_sigmas and step.log_norm_ratio < math.log(DOUBLE_RATIO) for step in recent)
    harm = incident.found(*LOSS_DETECTORS, "jump", "exploding_grads", "eval_regression")
    raised = _raised(incident)
    at_once = any(f.evidence.get("at_once", 1.0) > STRONG_RATIO for f in raised)  # the state before that is near
    return calm and not harm and not at_once and bool(raised) and _gains_nothing(incident)


def _gains_nothing(incident: Incident) -> bool:
    """For 16 rows the lr was far higher and the loss no lower, or the momentum was higher and so was the loss."""
    recent = incident.steps[-WINDOW_ROWS:]
    if len(recent) < WINDOW_ROWS:
        return False
    faster = incident.last.lr_ratio > STRONG_RATIO and all(step.lr_ratio > 1 / STRONG_RATIO for step in recent)
    if faster and sum(step.row.loss for step in recent) / WINDOW_ROWS >= incident.normal_loss:
        return True
    raised = min((f.evidence.get("momentum", math.inf) for f in _raised(incident)), default=math.inf)
    stays_raised = all(step.momentum >= raised for step in recent)
    # The standard error of such a mean is one sigma over the root of its rows.
    return stays_raised and sum(step.z for step in recent) / WINDOW_ROWS > DOUBLE_RATIO / math.sqrt(WINDOW_ROWS)


def _weights_damaged(incident: Incident, tolerant: bool) -> str:
    """Something else than the optimizer has written to the weights, and the loss has risen."""
    changed = abs(incident.weight_change) > math.log(CLEAR_RATIO)
    if not changed or not incident.found("loss_level", "jump") or not _loss_stays_high(incident, 1.0):
        return ""
    ratio = math.exp(min(incident.weight_change, 700.0))
    return f"the norm of the weights is {ratio:.3g} times what it was, which no update explains, and the loss has risen"


def _stale_grads(incident: Incident, tolerant: bool) -> str:
    """Gradients are not zeroed, and have grown beyond their usual size."""
    findings = incident.found("stale_grads")
    grown = sum(step.log_norm_ratio > 0 for step in incident.steps[-REPEAT_COUNT:]) > REPEAT_COUNT / 2
    harm = grown or incident.found("loss_level", "growth", "jump", "oscillation")
    return findings[0].detail if findings and harm else ""


def _clipping_lost(incident: Incident, tolerant: bool) -> str:
    """A run that depended on its clipping has lost it, and suffers."""
    lost = [f for f in incident.found("clipping_changed") if f.evidence["times"] > 1]
    harm = incident.found("loss_level", "growth", "jump", "oscillation")
    return f"{lost[0].detail}, and {harm[0].detail}" if lost and harm else ""


def _silent_layers(incident: Incident, tolerant: bool) -> str:
    """Layers no longer get gradients, and the loss has risen."""
    silent, level = incident.found(*SILENCE_DETECTORS), incident.found("loss_level")
    if not silent or not level:
        return ""
    share = max(f.evidence["share"] for f in silent)
    after = [f for f in level if f.evidence.get("slowly") and f.attempt >= silent[0].attempt]
    slowly = share > SMALL_FRACTION and bool(after)
    sigmas = 1.0 if share > NOTABLE_FRACTION else incident.thresholds.level_sigmas
    return f"{silent[0].detail}, and {level[0].detail}" if slowly or _loss_stays_high(incident, sigmas) else ""


def _huge_update(incident: Incident, tolerant: bool) -> str:
    """A huge update was applied, and the loss has risen since."""
    huge = [f for f in incident.found("jump") if f.evidence["huge"]]
    level = [f for f in incident.found("loss_level") if huge and f.attempt > huge[0].attempt]
    lasts = len(incident.steps) > REPEAT_COUNT and _loss_stays_high(incident, incident.thresholds.level_sigmas)
    return f"{huge[0].detail}, and {level[0].detail}" if level and lasts else ""


def _excess_update(incident: Incident, tolerant: bool) -> str:
    """An update was too large for its lr, and the loss has risen since."""
    level = incident.found("loss_level")
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
    for regression in (f for f in incident.found("eval_regression") if not f.evidence["raised"]):
        healthy = regression.evidence["well"]
        loss_findings = incident.found(*LOSS_DETECTORS, "jump")
        between = [f for f in loss_findings if healthy <= f.attempt < regression.attempt]
        signs = [f for f in between if _explains_harm(f, incident, regression)]
        signs += [f for f in incident.found("input_shift") if healthy <= f.attempt and _is_other_data(f)]
        # A single evaluation must be beyond doubt, and the harm must last: a gentle rise may be meant, and may heal.
        beyond_doubt = regression.evidence["lost"] or any(f.detector == "jump" for f in signs)
        if signs and (regression.evidence["twice"] or (beyond_doubt and _train_loss_rose_too(regression, incident))):
            return f"{regression.detail}, and {signs[0].detail}"
    return ""


def _train_loss_rose_too(regression: Finding, incident: Incident) -> bool:
    """The training loss has risen by a good part of what the eval loss has: it is the same harm."""
    recent = sorted(step.row.loss for step in incident.steps[-RECENT_ROWS:])
    rise = recent[len(recent) // 2] - incident.normal_loss
    return _loss_stays_high(incident, 1.0) and rise > NOTABLE_FRACTION * _eval_rise(regression)


def _explains_harm(finding: Finding, incident: Incident, regression: Finding) -> bool:
    """Whether a finding explains the risen eval loss: a large norm jump, or a loss that rose by more than a negligible
    amount and by a good part of the eval loss's rise (a single loss by half of it).

    A level that only crept up, or is on its way down since, counts only where the harm is great and lasts: batches may
    be harder on purpose, and are then learnt.
    """
    evidence, harm = finding.evidence, _eval_rise(regression)
    if finding.detector == "jump" and evidence["norm_ratio"] > math.log(incident.thresholds.large_norm_jump_ratio):
        return True
    min_rise = NEGLIGIBLE_FRACTION * abs(incident.start_loss)
    if finding.detector != "loss_level":
        return evidence["loss"] - incident.normal_loss > max(min_rise, harm / DOUBLE_RATIO)
    level_sigmas = incident.thresholds.level_sigmas
    sudden = evidence["deviations"] > level_sigmas or _loss_stays_high(incident, level_sigmas)
    crept = evidence.get("slowly") or not sudden
    rise = evidence["level"] - evidence["normal"]
    remaining = regression.evidence["lately"] - evidence["normal"]
    being_learnt = NOTABLE_FRACTION * rise < remaining < rise / DOUBLE_RATIO
    great = regression.evidence["lost"] or harm > (CLEAR_RATIO - 1) * abs(regression.evidence["best"])
    counts = not (crept or being_learnt) or (great and regression.evidence["twice"])
    return counts and rise > max(min_rise, NOTABLE_FRACTION * harm)


def _eval_rise(regression: Finding) -> float:
    """By how much the eval loss is above its best."""
    return regression.evidence["eval_loss"] - regression.evidence["best"]


def _is_other_data(finding: Finding) -> bool:
    """A batch whose std is ten times the usual one."""
    return finding.evidence.get("spread", 0.0) > HUGE_RATIO * finding.evidence.get("usual", math.inf)


RULES = (
    _ranks_differ,
    _eval_harm,
    _stale_grads,
    _clipping_lost,
    _severe_finding,
    _updates_rescaled,
    _hyperparam_harm,
    _weights_damaged,
    _silent_layers,
    _huge_update,
    _excess_update,
    _refused,
)
"""Asked in this order; `tolerant` says that the updates do not grow with the gradients (adaptive, or clipped)."""

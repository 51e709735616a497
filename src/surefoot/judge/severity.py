"""What calls for an action: each rule looks at a case and gives its reason in words, or none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surefoot.judge.incident import SILENCE, SUFFERS, Incident
from surefoot.judge.policy import AGAIN, CLEARLY, DOUBLE, FEW, HUGE, MANIFOLD, NOTHING, PART, SMALL, WHILE
from surefoot.records import Finding, Verdict


def is_severe(case: Incident, *, adaptive: bool, clipped: bool) -> str:
    """Why something must be done about this, in words; nothing when telling is enough."""
    return next((why for rule in GRAVE if (why := rule(case, adaptive or clipped))), "")


def _apart(case: Incident, bears: bool) -> str:
    """The ranks hold different weights, and were equal before."""
    return next((f.detail for f in case.found("replicas") if f.severe), "")


def _told(case: Incident, bears: bool) -> str:
    """A detector is sure of it."""
    # It may be told in another unit, and be no higher.
    in_units = _lowered(case) or (case.found("units") and (bears or _compensated(case)))
    young = len(case.moments) <= AGAIN
    # A leap may heal by itself, and of weights that are others tells more what else that did.
    aside = {"level": in_units, "jump": young, "weights": len(case.moments) <= FEW}
    return next((f.detail for f in case.findings if f.severe and not aside.get(f.detector, False)), "")


def _multiplied(case: Incident, bears: bool) -> str:
    """Updates have grown with the gradients: at once, and not because the data is another."""
    units = in_units_at_once(case)
    harder = any(m.strange >= 1 for m in case.moments)
    return units[0].detail if units and not bears and not harder and not _compensated(case) else ""


def in_units_at_once(case: Incident) -> list[Finding]:
    """Loss and gradients were multiplied when the trouble began: not long after it, nor before."""
    return [f for f in case.found("units") if case.onset <= f.attempt <= case.onset + FEW]


def _compensated(case: Incident) -> bool:
    """The rate was lowered by as much as the loss was multiplied."""
    return case.found("units")[0].evidence["factor"] * case.last.rate_ratio < DOUBLE


def _lowered(case: Incident) -> bool:
    """The loop has lowered the rate with the level's rise, by about as much: the loss counts more now, on purpose."""
    usual = case.rates[0] if case.rates else math.nan
    part = case.last.row.lr / usual if 0 < usual < math.inf else 1.0
    return part * DOUBLE < 1 and all(f.evidence["level"] * part < DOUBLE * case.normal for f in case.found("level"))


def _set_wrong(case: Incident, bears: bool) -> str:
    """Rate or momentum were raised, and the run suffers from it."""
    raised = _raised(case)
    if any(f.evidence.get("momentum", 0) >= 1 for f in raised):
        return raised[0].detail
    suffers = case.found(*SUFFERS) or [f for f in case.found("astray") if f.evidence["raised"]]
    if raised and suffers and not (_falls(case) and all(f.detector == "growth" for f in suffers)):
        return f"{raised[0].detail}, and {suffers[0].detail}"
    return f"{raised[0].detail}, and nothing is gained by it" if raised and _gains_nothing(case) else ""


def _falls(case: Incident) -> bool:
    """The last losses, but for one that may stand out, are lower than they were: a run that was waiting for its rate
    may learn at last."""
    return sum(not m.row.loss < case.normal for m in case.moments[-FEW:]) <= 1


def _raised(case: Incident) -> list[Finding]:
    return [f for f in case.found("settings") if "times" in f.evidence or "momentum" in f.evidence]


def only_raised(case: Incident) -> bool:
    """Rate or momentum were raised in vain, the rate not at once, and no harm has come of it: nothing stands out."""
    calm = all(m.z < case.sight.raised and m.norm_ratio < math.log(DOUBLE) for m in case.moments[-WHILE:])
    harm = case.found(*SUFFERS, "jump", "exploding", "astray")
    leapt = any(f.evidence.get("at_once", 1.0) > MANIFOLD for f in _raised(case))  # the state before that is near
    return calm and not harm and not leapt and bool(_raised(case)) and _gains_nothing(case)


def _gains_nothing(case: Incident) -> bool:
    """For long the rate has been far higher than it was and the loss is no lower, or the momentum and it is higher."""
    lately = case.moments[-WHILE:]
    if len(lately) < WHILE:
        return False
    faster = case.last.rate_ratio > MANIFOLD and all(m.rate_ratio > 1 / MANIFOLD for m in lately)
    if faster and sum(m.row.loss for m in lately) / WHILE >= case.normal:
        return True
    raised = min((f.evidence.get("momentum", math.inf) for f in _raised(case)), default=math.inf)
    stiffer = all(m.momentum >= raised for m in lately)
    # Such a mean errs by one deviation over the root of how many there are.
    return stiffer and sum(m.z for m in lately) / WHILE > DOUBLE / math.sqrt(WHILE)


def _tampered(case: Incident, bears: bool) -> str:
    """Something else than the optimizer has written to the weights, and the loss has risen."""
    if not abs(case.weights) > math.log(CLEARLY) or not case.found("level", "jump") or not _high(case, 1.0):
        return ""
    times = math.exp(min(case.weights, 700.0))
    return f"the norm of the weights is {times:.3g} times what it was, which no update explains, and the loss has risen"


def _piled_up(case: Incident, bears: bool) -> str:
    """Gradients are left over, and have grown beyond what they were."""
    left = case.found("stale_grads")
    grown = sum(m.norm_ratio > 0 for m in case.moments[-AGAIN:]) > AGAIN / 2
    return left[0].detail if left and (grown or case.found("level", "growth", "jump", "oscillation")) else ""


def _unclipped(case: Incident, bears: bool) -> str:
    """A run that lived by its clipping has lost it, and suffers."""
    lost = [f for f in case.found("lost_clip") if f.evidence["times"] > 1]
    suffers = case.found("level", "growth", "jump", "oscillation")
    return f"{lost[0].detail}, and {suffers[0].detail}" if lost and suffers else ""


def _silent(case: Incident, bears: bool) -> str:
    """Gradients no longer come through, and the loss has risen."""
    silent, level = case.found(*SILENCE), case.found("level")
    if not silent or not level:
        return ""
    share = max(f.evidence["share"] for f in silent)
    slowly = share > SMALL and any(f.evidence.get("slowly") and f.attempt >= silent[0].attempt for f in level)
    told = f"{silent[0].detail}, and {level[0].detail}"
    return told if slowly or _high(case, 1.0 if share > PART else case.sight.raised) else ""


def _landed(case: Incident, bears: bool) -> str:
    """A huge update has landed, and the loss has risen since."""
    huge = [f for f in case.found("jump") if f.evidence["huge"]]
    level = [f for f in case.found("level") if huge and f.attempt > huge[0].attempt]
    stays = len(case.moments) > AGAIN and _high(case, case.sight.raised)
    return f"{huge[0].detail}, and {level[0].detail}" if level and stays else ""


def _outgrown(case: Incident, bears: bool) -> str:
    """An update was too large for its rate, and the loss has risen since."""
    level = case.found("level")
    if not level or not case.update > 1 or not _high(case, case.sight.raised / 2):
        return ""
    return f"an update was {case.update:.3g} times larger than usual at the same rate, and {level[0].detail}"


def _high(case: Incident, deviations: float) -> bool:
    """Most of the last losses lie so far above normal: a rise that was told may be over by now. Where it takes little,
    more of them have to: chance alone brings three of five now and then."""
    last = case.moments[-FEW if deviations > 1 else -WHILE :]
    return sum(moment.z > deviations for moment in last) >= max(AGAIN, 1 + len(last) // 2)


def _refused(case: Incident, bears: bool) -> str:
    """One refusal after the other, or again and again where other numbers can hold what these cannot."""
    last = case.last.row
    sound = math.isfinite(last.loss) or last.rank >= 0
    # Soon when not even the loss is finite, for then it may be the weights; late when refusing is all that is needed.
    most = 2 * AGAIN if last.verdict is Verdict.NORM_OUTLIER else WHILE if sound else AGAIN
    if case.refused >= most:
        return f"{case.refused} updates in a row were refused: {_last(case.findings)}"
    lately = case.moments[-WHILE:]
    beyond = [m for m in lately if m.row.verdict is Verdict.NONFINITE and math.isinf(m.row.loss)]
    # Each of these halves the loss scale, too.
    often = len(beyond) >= AGAIN and last is beyond[-1].row and not math.isnan(last.loss_scale)
    return f"{len(beyond)} of {len(lately)} updates were refused: {_last(case.findings)}" if often else ""


def _astray(case: Incident, bears: bool) -> str:
    """Training has left its course, and held-out data says that it does harm."""
    for told in (f for f in case.found("astray") if not f.evidence["raised"]):
        suffers = [f for f in case.found(*SUFFERS, "jump") if told.evidence["well"] <= f.attempt < told.attempt]
        signs = [f for f in suffers if _matters(f, case, told)]
        signs += [f for f in case.found("inputs") if told.evidence["well"] <= f.attempt and _unlike(f)]
        # Told once, it must be beyond doubt, and last: what comes gently may be meant, and may heal.
        doubtless = told.evidence["lost"] or any(f.detector == "jump" for f in signs)
        if signs and (told.evidence["twice"] or (doubtless and _alike(told, case))):
            return f"{told.detail}, and {signs[0].detail}"
    return ""


def _alike(told: Finding, case: Incident) -> bool:
    """The loss in training has risen, too, and by a good part of what it has on held-out data: it is the same harm."""
    lately = sorted(m.row.loss for m in case.moments[-FEW:])
    risen = lately[len(lately) // 2] - case.normal
    return _high(case, 1.0) and risen > PART * _harm(told)


def _matters(found: Finding, case: Incident, told: Finding) -> bool:
    """An update of another kind, or a loss that has risen by more than next to nothing, and by a good part of the harm;
    a single one by half of it. A level that has only crept up, or is on its way down since, is believed where the
    harm is great, and lasts: batches may be harder on purpose, and are learnt. What is over altogether was not."""
    seen, harm = found.evidence, _harm(told)
    if found.detector == "jump" and seen["norm_ratio"] > math.log(case.sight.leap):
        return True
    least = NOTHING * abs(case.start)
    if found.detector != "level":
        return seen["loss"] - case.normal > max(least, harm / DOUBLE)
    crept = seen.get("slowly") or not (seen["deviations"] > case.sight.raised or _high(case, case.sight.raised))
    rise = seen["level"] - seen["normal"]
    learnt = PART * rise < told.evidence["lately"] - seen["normal"] < rise / DOUBLE
    great = told.evidence["lost"] or harm > (CLEARLY - 1) * abs(told.evidence["best"])
    believed = not (crept or learnt) or (great and told.evidence["twice"])
    return believed and rise > max(least, PART * harm)


def _harm(told: Finding) -> float:
    """By how much the loss on held-out data has risen."""
    return told.evidence["eval_loss"] - told.evidence["best"]


def _unlike(found: Finding) -> bool:
    """A batch of another kind altogether."""
    return found.evidence.get("spread", 0.0) > HUGE * found.evidence.get("usual", math.inf)


GRAVE = (
    _apart,
    _astray,
    _piled_up,
    _unclipped,
    _told,
    _multiplied,
    _set_wrong,
    _tampered,
    _silent,
    _landed,
    _outgrown,
    _refused,
)
"""What calls for an action, each with its reason in words; `bears` when the run does not mind larger gradients."""


def _last(findings: Sequence[Any]) -> str:
    return findings[-1].detail if findings else ""

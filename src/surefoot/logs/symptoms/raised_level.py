"""A loss above the level it had reached: since a jump, or slowly, however long ago."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.symptoms.chance_level import chance_classes
from surefoot.logs.symptoms.symptom import LossScan, RunView, Symptom, format_number, lr_raised
from surefoot.records import Cause, Pattern
from surefoot.signals.change import Change, ChangeKind
from surefoot.signals.dating import find_step

LEVEL_ROWS = 10
"""Rows whose median is a level to tell the user."""
MIN_ROWS_AFTER = 8
"""With fewer rows after a jump it may still be a spike."""
PRECEDENT_SHARE = 0.8
"""An earlier jump of this relative size that came back is a precedent."""
MIN_ALIKE = 4
"""So many rises that came back are how this run is: a wave, a schedule that restarts."""
SOON_SHARE, SUDDEN_SHARE = 0.05, 0.5
"""It was a jump if this share of the rise was there within this share of the rows since."""
MIN_PROGRESS = 0.15
"""What a run had learnt by a change, as a logarithm, that is worth losing."""
START_SHARE = 0.95
"""From this share of the first loss on, all that was learnt is lost."""
FEW = 5
"""Rows right after a jump."""
COMING_BACK_SHARE = 0.5
"""A jump of which less than this is left may be coming back."""
LASTING_SHARE = 0.05
"""A jump has lasted after this share of the rows before it."""
MIN_FALL_SHARE = 0.06
"""What is left of a rise falls by this share over the second half of its age, if it still falls."""

JUMP_CAUSES = ((Cause.BAD_BATCH, 0.4), (Cause.PRECISION_OVERFLOW, 0.2), (Cause.LEARNING_RATE, 0.2))
DRIFT_CAUSES = ((Cause.DRIFT, 0.4), (Cause.LEARNING_RATE, 0.35), (Cause.SCHEDULE, 0.2))


@dataclass(frozen=True, slots=True)
class RaisedLevel:
    """The present level above the one that was accepted last."""

    change: Change
    step: float
    rise: float
    """Of the logarithm, above the level before."""
    before: float
    """The level before it, as logged."""
    top: float
    last: float
    first: float
    """The first loss of the run."""
    began_again: bool
    """The loss leapt to where it was in the beginning."""
    rows_after: int
    sudden: bool
    """It rose within a few rows, and not ever since."""

    @property
    def lost_all(self) -> bool:
        """Whether the loss is as high again as it was in the beginning."""
        return has_learnt(self.first, self.before) and self.last >= START_SHARE * self.first


def has_learnt(first: float, before: float) -> bool:
    """Whether a run had learnt something worth losing."""
    return first > 0 and before < first * (1 - MIN_PROGRESS)


def raised_level(view: RunView) -> RaisedLevel | None:
    """The first change of the loss that has not come back, if its level is still above the one before."""
    scan = view.scan
    if scan is None or view.adversarial:
        return None
    for change in scan.test.open:
        rise = scan.test.level_now() - change.reference
        if rise > max(change.margin, scan.test.baseline.error_of(LEVEL_ROWS)) and not _is_usual(scan, change):
            return _describe(scan, change, rise)
    return None


def _describe(scan: LossScan, change: Change, rise: float) -> RaisedLevel:
    step = find_step(scan.values, change) if change.slow else None
    at = change.onset if step is None else step
    soon = scan.values[at : at + max(LEVEL_ROWS, int(SOON_SHARE * (len(scan.raw) - at)))]
    at_once = not change.slow and float(np.median(soon)) - change.reference > SUDDEN_SHARE * rise
    first = float(np.median(scan.raw[:3]))
    before = float(np.median(scan.raw[max(0, at - LEVEL_ROWS) : at])) if at else float(scan.raw[0])
    return RaisedLevel(
        change=change,
        step=float(scan.steps[at]),
        rise=rise,
        before=before,
        top=float(scan.raw[at:].max()),
        last=float(np.median(scan.raw[-LEVEL_ROWS:])),
        first=first,
        began_again=has_learnt(first, before) and float(np.median(scan.raw[at : at + FEW])) >= START_SHARE * first,
        rows_after=len(scan.raw) - at,
        sudden=at_once or step is not None,
    )


def _is_usual(scan: LossScan, change: Change) -> bool:
    """Whether the loss rose like this several times and came back, and has had no longer to do so now."""
    alike = [one for one in scan.test.changes if one.end is not None and one.size >= PRECEDENT_SHARE * change.size]
    longest = max((one.end - one.onset for one in alike if one.end is not None), default=0)
    return len(alike) >= MIN_ALIKE and len(scan.raw) - change.onset <= longest


def find_raised_level(view: RunView) -> Symptom | None:
    """A warning while the level is above the one before; failed if it is far above, or all that was learnt is lost."""
    raised = raised_level(view)
    if raised is None:
        return None
    slow = not raised.sudden
    above = f"{np.expm1(raised.rise):.1%}".replace("%", " %")
    before, top = format_number(raised.before), format_number(raised.top)
    evidence = [f"the loss was down to about {before} before, {top} at its highest since"]
    evidence.append(f"{format_number(raised.last)} at the end, {above} above the level before")
    if raised.lost_all:
        evidence.append(f"all that was learnt is lost: the first loss was {format_number(raised.first)}")
    classes = chance_classes(raised.last, raised.first, view.settings)
    chance = classes is not None and has_learnt(raised.last, raised.before)
    if chance:
        evidence.append(f"{format_number(raised.last)} is the logarithm of {classes}: the model guesses")
    rate, words = lr_raised(view, raised.step)
    at = view.at_step(raised.step)
    return Symptom(
        verdict=RunHealth.FAILED if _has_failed(view, raised, chance=chance) else RunHealth.WARNING,
        pattern=Pattern.NONE if slow else Pattern.JUMP,
        sentence=f"The loss was lowest at {at} and has risen by {above} since."
        if slow
        else f"The loss jumped up at {at} and has not come back to the level before.",
        onset=raised.step,
        causes=rate or (DRIFT_CAUSES if slow else JUMP_CAUSES),
        evidence=(*evidence, *words),
    )


def _has_failed(view: RunView, raised: RaisedLevel, *, chance: bool) -> bool:
    """New data can double a loss for a while, so a jump alone has failed only once it has lasted and falls no more."""
    if raised.rows_after < MIN_ROWS_AFTER or raised.change.kind is ChangeKind.SPIKE:
        return False
    if raised.lost_all or chance:
        return True
    far = max(view.thresholds.blowup_rise, view.thresholds.rise_to_noise * raised.change.noise)
    if raised.rise <= far or has_precedent(view, raised):
        return False
    if raised.began_again and raised.rise > COMING_BACK_SHARE * raised.change.size:
        return True
    return raised.rows_after >= LASTING_SHARE * raised.change.onset and not still_falls(view, raised)


def has_precedent(view: RunView, raised: RaisedLevel) -> bool:
    """Whether a similar rise came back earlier in the run."""
    assert view.scan is not None
    back = [change.size for change in view.scan.test.changes if change.end is not None]
    return max(back, default=0.0) >= PRECEDENT_SHARE * raised.change.size


def still_falls(view: RunView, raised: RaisedLevel) -> bool:
    """Whether the loss has become lower over the second half of the rows since."""
    assert view.scan is not None
    later = view.scan.values[raised.change.onset + raised.rows_after // 2 :]
    few = max(1, len(later) // 4)
    return float(np.median(later[:few]) - np.median(later[-few:])) > MIN_FALL_SHARE * raised.rise

"""Does it learn, and stay on its feet: the loss, the rate, and what the guard had to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from surefoot.journal.reader import Run
from surefoot.train.check.item import Item, Status, failed, ok, skipped, warning
from surefoot.train.check.rows import landed, settled
from surefoot.train.check.trial import Trial

_FEW = 10
"""Updates below which a course cannot be told from chance."""
_FIRST = 3
"""Updates at the very start, when hardly anything has been learnt."""
_RISES = 1.05
_BOLD, _WILD = 0.1, 0.5
"""Change of the weights in one update, as a share of them, that seldom goes well, and never; 0.001 is usual."""
_GRAVE = ("constrain", "rewind", "stop")


def answers(trial: Trial, run: Run) -> Iterator[Item]:
    loss = _loss(trial, run)
    yield loss
    yield _stands(run)
    yield _rate(trial, run, learns=loss.status in (Status.OK, Status.SKIPPED))


def _loss(trial: Trial, run: Run) -> Item:
    losses, name = landed(run, "loss"), "loss falls"
    bad = int((~np.isfinite(np.asarray(run.scalars["loss"]))).sum()) if run.scalars.rows else 0
    if bad:
        return failed(name, f"the loss was not finite in {bad} updates", _CALMER, nonfinite=bad)
    if len(losses) < _FEW:
        return skipped(name, f"{len(losses)} updates are too few to tell", "Try more with --steps or --seconds.")
    last = losses[-max(_FIRST, len(losses) // 5) :]
    before, after = float(np.median(losses[:_FIRST])), float(last.mean())
    figures = {"first": before, "last": after}
    held = "" if trial.held_out_loss is None else f"; held out {trial.held_out_loss:.4f}"
    found = f"{before:.4f} to {after:.4f} in {len(losses)} updates{held}"
    if after > before * _RISES:
        return failed(name, f"it rises: {found}", _CALMER, **figures)
    noise = float(last.std() / np.sqrt(len(last)))
    if before - after <= noise:
        way = "Try more updates with --steps; if it stays so, look at the targets, then at the rate."
        return warning(name, f"not by more than chance: {found}", way, **figures)
    return ok(name, found, **figures)


_CALMER = "Lower optimizer.lr by ten, or lengthen schedule.warmup; then check again."


def _stands(run: Run) -> Item:
    name = "nothing had to be done"
    acts = Counter(str(event.get("action")) for event in run.events if event["kind"] == "decision")
    acts.pop("accept", None)
    acts.pop("relax", None)
    why = [event for event in run.events if event["kind"] == "diagnosis"]
    if not run.scalars.rows:
        return skipped(name, "no update was made")
    if not acts:
        return ok(name, f"no update of {run.scalars.rows} was refused, and no trouble seen")
    told = ", ".join(f"{many} x {act}" for act, many in acts.items())
    found, way = f"surefoot had to act: {told}", _CALMER
    if why:
        cause = str(why[0].get("cause")).replace("_", " ")
        found += f"; at update {why[0]['step']} because of {cause}: {why[0].get('detail') or why[0].get('evidence')}"
        way = "; ".join(str(each) for each in why[0].get("advice", ())) or way
    make = failed if any(act in acts for act in _GRAVE) else warning
    return make(name, found, way, acts=dict(acts), causes=sorted({str(event.get("cause")) for event in why}))


def _rate(trial: Trial, run: Run, *, learns: bool) -> Item:
    name, rates = "learning rate", landed(run, "lr")
    ratios = landed(run, "update_ratio")
    ratios = ratios[np.isfinite(ratios) & (ratios > 0)]
    if not len(rates):
        return skipped(name, "no update landed")
    peak, reached = trial.facts.rate, float(np.nanmax(rates))
    ratio = float(np.median(settled(ratios))) if len(ratios) else float("nan")
    figures = {"peak": peak, "reached": reached, "update_ratio": ratio if np.isfinite(ratio) else None}
    moved = f"; an update changes the weights by {ratio:.2g} of them" if np.isfinite(ratio) else ""
    if ratio > _BOLD:
        make = warning if learns and ratio <= _WILD else failed
        return make(name, f"{reached:.3g} is very high{moved}, and 0.001 is usual", _CALMER, **figures)
    if reached < 0.99 * peak:
        way = "To try the peak too, check with a short warmup (schedule.warmup=20), or for longer (--steps, --seconds)."
        return skipped(name, f"only up to {reached:.3g} of {peak:.3g}, the warmup is longer{moved}", way, **figures)
    return ok(name, f"{peak:.3g} was reached{moved}", **figures)

"""Training checks, answered from the trial's journal: loss, interventions, learning rate, gradients, clipping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.journal.reader import Run
from surefoot.records import Action
from surefoot.train.preflight.journal_columns import applied, later_half
from surefoot.train.preflight.report import (
    CheckItem,
    CheckStatus,
    failed,
    first_few,
    ok,
    skipped,
    warning,
    worst,
)
from surefoot.train.preflight.trial import ShortRun
from surefoot.train.recipe import Recipe

_MIN_UPDATES = 10
"""Fewer updates do not show a trend."""
_FIRST_UPDATES = 3
"""Updates at the very start, when hardly anything has been learned."""
_RISE = 1.05
_HIGH_RATIO, _EXTREME_RATIO = 0.1, 0.5
"""Relative weight change per update that seldom goes well, and never does; 0.001 is usual."""
_SEVERE_ACTIONS = (Action.CONSTRAIN, Action.REWIND, Action.STOP)
_LOWER_LR = "Lower optimizer.lr by a factor of ten, or lengthen schedule.warmup; then check again."

VANISHING, EXPLODING, DEAD = 1e-8, 100.0, 0.5
"""Gradient norm below, norm above, fraction of a tensor that never has a gradient."""
_MIN_NORMS = 15
"""Norms needed to judge a clip threshold."""
_CLIP_FACTOR = 2.5
"""The suggested threshold is this factor times the normal maximum; 2 to 3 is usual."""
_CLIPS_OFTEN, _TOO_HIGH = 0.2, 10.0
"""Fraction of clipped updates that is too large, and factor above the normal maximum at which clipping is useless."""


def items(trial: ShortRun, run: Run, recipe: Recipe) -> Iterator[CheckItem]:
    loss = _loss(trial, run)
    yield loss
    yield _interventions(trial, run)
    yield _learning_rate(trial, run, learns=loss.status in (CheckStatus.OK, CheckStatus.SKIPPED))
    yield _gradients(trial, run)
    yield _clip_threshold(recipe, run)


def _loss(trial: ShortRun, run: Run) -> CheckItem:
    losses, name = applied(run, "loss"), "loss decreases"
    nonfinite = int((~np.isfinite(np.asarray(run.scalars["loss"]))).sum()) if run.scalars.rows else 0
    if nonfinite:
        return failed(name, f"the loss was not finite in {nonfinite} updates", _LOWER_LR, nonfinite=nonfinite)
    if len(losses) < _MIN_UPDATES:
        return skipped(name, f"{len(losses)} updates are too few to tell", "Try more with --steps or --seconds.")
    last = losses[-max(_FIRST_UPDATES, len(losses) // 5) :]
    before, after = float(np.median(losses[:_FIRST_UPDATES])), float(last.mean())
    values = {"first": before, "last": after}
    eval_loss = "" if trial.eval_loss is None else f"; eval loss {trial.eval_loss:.4f}"
    message = f"{before:.4f} to {after:.4f} in {len(losses)} updates{eval_loss}"
    if after > before * _RISE:
        return failed(name, f"it rises: {message}", _LOWER_LR, **values)
    noise = float(last.std() / np.sqrt(len(last)))
    if before - after <= noise:
        fix = "Try more updates with --steps; if it stays flat, look at the targets, then at the lr."
        return warning(name, f"not by more than its noise: {message}", fix, **values)
    return ok(name, message, **values)


def _interventions(trial: ShortRun, run: Run) -> CheckItem:
    name = "no interventions"
    actions = Counter(str(event.get("action")) for event in run.events if event["kind"] == "decision")
    actions.pop(Action.ACCEPT, None)
    actions.pop(Action.RELAX, None)
    diagnoses = [event for event in run.events if event["kind"] == "diagnosis"]
    if not run.scalars.rows:
        return skipped(name, "no update was made")
    if not actions:
        return ok(name, f"none of {run.scalars.rows} updates was refused, and no trouble was found")
    counts = ", ".join(f"{count} x {action}" for action, count in actions.items())
    message, fix = f"surefoot had to act: {counts}", _LOWER_LR
    if diagnoses:
        first = diagnoses[0]
        cause = str(first.get("cause")).replace("_", " ")
        message += f"; at update {first['step']} because of {cause}: {first.get('detail') or first.get('evidence')}"
        fix = "; ".join(str(advice) for advice in first.get("advice", ())) or fix
    fix = _lr_that_worked(run, trial.facts.lr) or fix
    make = failed if any(action in actions for action in _SEVERE_ACTIONS) else warning
    causes = sorted({str(event.get("cause")) for event in diagnoses})
    return make(name, message, fix, acts=dict(actions), causes=causes)


def _lr_that_worked(run: Run, peak: float) -> str:
    """The learning rate that the run was continued with for good, as a recipe line; empty where it was not lowered."""
    overrides = [event["overrides"] for event in run.events if event["kind"] == "decision" and event["overrides"]]
    factor = min((float(o.get("lasting_lr_factor", 1.0)) for o in overrides), default=1.0)
    if not factor < 1.0:
        return ""
    return f"Set optimizer.lr={factor * peak:.3g}: the run went on with {factor:g} times its learning rate."


def _learning_rate(trial: ShortRun, run: Run, *, learns: bool) -> CheckItem:
    name, lrs = "learning rate", applied(run, "lr")
    ratios = applied(run, "update_ratio")
    ratios = ratios[np.isfinite(ratios) & (ratios > 0)]
    if not len(lrs):
        return skipped(name, "no update was applied")
    peak, reached = trial.facts.lr, float(np.nanmax(lrs))
    ratio = float(np.median(later_half(ratios))) if len(ratios) else float("nan")
    values = {"peak": peak, "reached": reached, "update_ratio": ratio if np.isfinite(ratio) else None}
    change = f"; an update changes the weights by a fraction of {ratio:.2g}" if np.isfinite(ratio) else ""
    if ratio > _HIGH_RATIO:
        make = warning if learns and ratio <= _EXTREME_RATIO else failed
        return make(name, f"{reached:.3g} is very high{change}, and 0.001 is usual", _LOWER_LR, **values)
    if reached < 0.99 * peak:
        fix = "To try the peak too, check with a short warmup (schedule.warmup=20), or longer (--steps, --seconds)."
        return skipped(name, f"only up to {reached:.3g} of {peak:.3g}: the warmup is longer{change}", fix, **values)
    return ok(name, f"the peak {peak:.3g} was reached{change}", **values)


@dataclass(frozen=True, slots=True)
class _GradientProblem:
    """A kind of problem with gradients, and the tensors that have it."""

    description: str
    fix: str
    status: CheckStatus
    names: Sequence[str]


def _gradients(trial: ShortRun, run: Run) -> CheckItem:
    """Norms over the later half of the trial, tensor by tensor."""
    item_name, layers = "gradients by layer", run.layers
    if layers.rows < 2:
        return skipped(item_name, f"{layers.rows} updates are too few")
    names = list(layers)
    grid, zeros = (_later_rows(np.asarray(layers.grid(column))) for column in ("norm", "zeros"))
    nonfinite = np.asarray(np.nan_to_num(layers.grid("nonfinite")).max(0) > 0)
    absent = np.asarray(np.isnan(grid).all(0))
    norms = np.nanmedian(np.where(absent, 0.0, grid), axis=0)
    zero_fraction = np.nanmin(np.where(absent, 0.0, zeros), axis=0)
    is_layer = np.array([_is_layer_weight(trial, name, layers.numels[name]) for name in names])
    tiny = ~absent & ~nonfinite & (norms < VANISHING)
    masks = {
        "nonfinite": nonfinite,
        "exploding": ~nonfinite & (norms > EXPLODING),
        "vanishing": tiny & is_layer,
        "dead": ~tiny & ~absent & (zero_fraction > DEAD) & is_layer,
        "tiny": tiny & ~is_layer,
        "absent": absent,
    }
    problems = _gradient_problems({kind: [names[i] for i in np.flatnonzero(mask)] for kind, mask in masks.items()})
    medians = {name: None if absent[i] else float(norms[i]) for i, name in enumerate(names)}
    if not problems:
        low, high = int(norms.argmin()), int(norms.argmax())
        lowest, highest = f"{norms[low]:.2g} ({names[low]})", f"{norms[high]:.2g} ({names[high]})"
        return ok(item_name, f"{len(names)} tensors, norms from {lowest} to {highest}", norms=medians)
    message = "; ".join(f"{problem.description}: {first_few(problem.names)}" for problem in problems)
    fixes = " ".join(dict.fromkeys(problem.fix for problem in problems))
    return CheckItem(item_name, worst(problem.status for problem in problems), message, fixes, {"norms": medians})


def _later_rows(grid: np.ndarray) -> np.ndarray:
    return grid[len(grid) // 2 :]


def _is_layer_weight(trial: ShortRun, name: str, numel: int) -> bool:
    """Whether a tiny gradient means that a layer does not learn. Of embeddings only the rows in use have gradients,
    and the bias of attention keys has none by construction."""
    return name.removeprefix("module.") not in trial.facts.embeddings and not name.endswith("bias") and numel > 1


def _gradient_problems(names: dict[str, list[str]]) -> list[_GradientProblem]:
    fail, warn = CheckStatus.FAILED, CheckStatus.WARNING
    detached = (
        "These layers do not learn: look for a detach, a saturated activation or weights that start at 0 between them "
        "and the output, and add a residual connection or a norm."
    )
    table = (
        ("nonfinite", "not finite", "Compute these layers in float32 (precision.keep_float32).", fail),
        ("exploding", f"explode (above {EXPLODING:g})", "Lower the lr, clip, or use smaller initial weights.", fail),
        ("vanishing", f"vanish (below {VANISHING:g})", detached, fail),
        (
            "dead",
            f"always zero for more than {DEAD:.0%} of their values",
            "Many units are dead: use GELU or a leaky ReLU, or lower the lr.",
            warn,
        ),
        ("tiny", f"below {VANISHING:g}", "Harmless for a bias of attention keys; else see where it is used.", warn),
        ("absent", "never have one", "Freeze them (requires_grad=False), or use them in forward.", warn),
    )
    return [
        _GradientProblem(description, fix, status, names[kind])
        for kind, description, fix, status in table
        if names[kind]
    ]


def _clip_threshold(recipe: Recipe, run: Run) -> CheckItem:
    """Thresholds by two rules from the later half of the norms; then how the recipe's own threshold does."""
    name, norms = "clip threshold", later_half(applied(run, "norm"))
    if len(norms) < _MIN_NORMS // 3:
        return skipped(name, f"{len(norms)} norms are too few", "Try more updates with --steps or --seconds.")
    maximum = normal_maximum(norms)
    by_maximum, by_std = _round(_CLIP_FACTOR * maximum), _round(float(norms.mean() + 3 * norms.std()))
    values = {"suggested": by_maximum, "mean_and_3_deviations": by_std, "normal_maximum": maximum}
    measured = (
        f"norms up to {maximum:.3g}: clip at {by_maximum:g} ({_CLIP_FACTOR:g} x that) or {by_std:g} (mean + 3 std)"
    )
    clip, mode = recipe.protection.clip, recipe.protection.mode
    if mode != "protect" or clip is None or clip == "adaptive":
        setting = "the recipe's threshold is adaptive" if clip == "adaptive" else "the recipe does not clip"
        message = setting if mode == "protect" else f"nothing is clipped with protection.mode={mode}"
        return ok(name, f"{measured}; {message}", **values)
    if len(norms) < _MIN_NORMS:
        return ok(name, f"{measured}; too early to judge the recipe's {clip:g}", **values)
    clipped = float((norms > clip).mean())
    values["clipped_share"] = clipped
    better = f"protection.clip={by_maximum:g}"
    if clipped > _CLIPS_OFTEN:
        fix = f"It lowers the lr more than it protects: set {better}, or lower the lr."
        return warning(name, f"{measured}; the recipe's {clip:g} clips {clipped:.0%} of updates", fix, **values)
    if clip > _TOO_HIGH * maximum:
        return warning(name, f"{measured}; the recipe's {clip:g} is far too high", f"Set {better}.", **values)
    return ok(name, f"{measured}; the recipe's {clip:g} clips {clipped:.0%} of updates", **values)


def normal_maximum(norms: np.ndarray) -> float:
    """The largest norm that is not an outlier: at most 3 interquartile ranges above the upper quartile."""
    low, high = np.quantile(norms, (0.25, 0.75))
    return float(norms[norms <= high + 3 * (high - low)].max())


def _round(value: float) -> float:
    """To two significant digits; more would be noise."""
    return float(f"{value:.2g}")

"""A threshold to clip at, from the norms that were measured."""

from __future__ import annotations

import numpy as np

from surefoot.journal.reader import Run
from surefoot.train.check.item import Item, ok, skipped, warning
from surefoot.train.check.rows import landed, settled
from surefoot.train.recipe import Recipe

_NAME = "clip threshold"
_FEW = 15
"""Norms from which it can be told whether a threshold does well."""
_TIMES = 2.5
"""Between 2 and 3 times the normal maximum."""
_OFTEN, _FAR = 0.2, 10.0
"""Share of updates that are clipped, and how far above the normal maximum a threshold is of no use."""


def answer(recipe: Recipe, run: Run) -> Item:
    """Two rules, from updates of the later half; then how the recipe's own threshold does."""
    norms = settled(landed(run, "norm"))
    if len(norms) < _FEW // 3:
        return skipped(_NAME, f"{len(norms)} norms are too few", "Try more updates with --steps or --seconds.")
    top = normal_maximum(norms)
    by_top, by_spread = _round(_TIMES * top), _round(float(norms.mean() + 3 * norms.std()))
    figures = {"suggested": by_top, "mean_and_3_deviations": by_spread, "normal_maximum": top}
    measured = f"norms up to {top:.3g}: clip at {by_top:g} ({_TIMES:g} x that) or {by_spread:g} (mean + 3 deviations)"
    own, policy = recipe.protection.clip, recipe.protection.policy
    if policy != "protect" or own is None or own == "adaptive":
        what = "the recipe's threshold follows the norms" if own == "adaptive" else "the recipe clips nothing"
        words = what if policy == "protect" else f"nothing is clipped with protection.policy={policy}"
        return ok(_NAME, f"{measured}; {words}", **figures)
    if len(norms) < _FEW:
        return ok(_NAME, f"{measured}; it is too early to judge the recipe's {own:g}", **figures)
    share = float((norms > own).mean())
    figures["clipped_share"] = share
    better = f"protection.clip={by_top:g}"
    if share > _OFTEN:
        way = f"It lowers the rate more than it protects: set {better}, or lower the rate."
        return warning(_NAME, f"{measured}; the recipe's {own:g} clips {share:.0%} of updates", way, **figures)
    if own > _FAR * top:
        return warning(_NAME, f"{measured}; the recipe's {own:g} is too far above", f"Set {better}.", **figures)
    return ok(_NAME, f"{measured}; the recipe's {own:g} clips {share:.0%} of updates", **figures)


def normal_maximum(norms: np.ndarray) -> float:
    """The largest that is no outlier: within three times the middle half, above it."""
    low, high = np.quantile(norms, (0.25, 0.75))
    return float(norms[norms <= high + 3 * (high - low)].max())


def _round(value: float) -> float:
    """To two digits, which is all that can be known."""
    return float(f"{value:.2g}")

"""Gradients by layer: which vanish, explode, are not finite, or never come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.journal.reader import Run
from surefoot.train.check.item import Item, Status, ok, skipped, some, worst
from surefoot.train.check.trial import Trial

VANISHES, EXPLODES, DEAD = 1e-8, 100.0, 0.5
"""Norm below, norm above, share of a tensor that never has a gradient."""
_NAME = "gradients by layer"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What may be wrong with a tensor's gradients."""

    words: str
    way_out: str
    status: Status
    names: Sequence[str]


def answer(trial: Trial, run: Run) -> Item:
    """Norms over the later half of the trial, tensor by tensor."""
    layers = run.layers
    if layers.rows < 2:
        return skipped(_NAME, f"{layers.rows} updates are too few")
    names = list(layers)
    grid, zeros = (_later(np.asarray(layers.grid(stat))) for stat in ("norm", "zeros"))
    bad = np.asarray(np.nan_to_num(layers.grid("nonfinite")).max(0) > 0)
    absent = np.asarray(np.isnan(grid).all(0))
    norms = np.nanmedian(np.where(absent, 0.0, grid), axis=0)
    share = np.nanmin(np.where(absent, 0.0, zeros), axis=0)
    wide = np.array([_is_wide(trial, name, layers.numels[name]) for name in names])
    small = ~absent & ~bad & (norms < VANISHES)
    chosen = {
        "bad": bad,
        "exploding": ~bad & (norms > EXPLODES),
        "vanishing": small & wide,
        "faint": small & ~wide,
        "dead": ~small & ~absent & (share > DEAD) & wide,
        "absent": absent,
    }
    kinds = _kinds({kind: [names[at] for at in np.flatnonzero(mask)] for kind, mask in chosen.items()})
    medians = {name: None if absent[at] else float(norms[at]) for at, name in enumerate(names)}
    if not kinds:
        low, high = int(norms.argmin()), int(norms.argmax())
        words = f"{len(names)} tensors, norms from {norms[low]:.2g} ({names[low]}) to {norms[high]:.2g} ({names[high]})"
        return ok(_NAME, words, norms=medians)
    found = "; ".join(f"{kind.words}: {some(kind.names)}" for kind in kinds)
    ways = " ".join(dict.fromkeys(kind.way_out for kind in kinds))
    return Item(_NAME, worst(kind.status for kind in kinds), found, ways, {"norms": medians})


def _later(grid: np.ndarray) -> np.ndarray:
    return grid[len(grid) // 2 :]


def _is_wide(trial: Trial, name: str, numel: int) -> bool:
    """Whether a faint gradient of it means that a layer does not learn; of embeddings only used rows have one, and the
    bias of attention's keys has none by its nature."""
    return name.removeprefix("module.") not in trial.facts.embeddings and not name.endswith("bias") and numel > 1


def _kinds(names: dict[str, list[str]]) -> list[_Kind]:
    table = (
        ("bad", "not finite", "Compute these layers in float32 (precision.keep_float32).", Status.FAILED),
        ("exploding", f"explode (above {EXPLODES:g})", "Lower the rate, clip, or make the first weights smaller.", _F),
        ("vanishing", f"vanish (below {VANISHES:g})", _DETACHED, Status.FAILED),
        ("dead", f"zero for more than {DEAD:.0%} of their values, always", _DYING, Status.WARNING),
        ("faint", f"below {VANISHES:g}", "Harmless for a bias of attention's keys; else see where it is used.", _W),
        ("absent", "never have one", "Freeze them (requires_grad=False), or use them in forward.", Status.WARNING),
    )
    return [_Kind(words, way, status, names[kind]) for kind, words, way, status in table if names[kind]]


_F, _W = Status.FAILED, Status.WARNING
_DETACHED = (
    "These layers do not learn: look for a detach, a saturated activation or weights that start at 0 in front of the "
    "output, and add a residual way around or a norm."
)
_DYING = "Many units are dead: use GELU or a leaky ReLU, or lower the rate."

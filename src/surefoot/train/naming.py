"""Which class the name of an optimizer in a recipe means."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from surefoot.train.factories import find

_ELSEWHERE = {"lamb": "Lamb", "lars": "LARS"}
"""Names that pytorch_optimizer knows, and torch does not."""

_UNFIT = {
    "lbfgs": "it asks for the loss several times an update, which this loop computes once",
    "sparseadam": "it takes only sparse gradients, which the guard cannot measure",
}


def optimizer_class(name: str) -> Callable[..., Any]:
    """The class of this name: of torch.optim in any case of letters, lamb or lars, or `module:Class`."""
    if ":" in name:
        return find("optimizer.name", name)
    wanted = name.lower().replace("_", "").replace("-", "")
    known = _known()
    if wanted in _UNFIT:
        raise ValueError(f"optimizer.name: {name} does not fit here: {_UNFIT[wanted]}. Use adamw, sgd or another one")
    if wanted in known:
        return known[wanted]
    if wanted in _ELSEWHERE:
        return _elsewhere(name, _ELSEWHERE[wanted])
    names = sorted({*known, *_ELSEWHERE})
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
    raise ValueError(f"optimizer.name: there is no optimizer {name!r}; {hint} One of your own is named module:Class")


def _known() -> dict[str, type[Optimizer]]:
    classes = [
        thing for thing in vars(torch.optim).values() if isinstance(thing, type) and issubclass(thing, Optimizer)
    ]
    return {kind.__name__.lower(): kind for kind in classes if kind is not Optimizer}


def _elsewhere(name: str, found: str) -> Callable[..., Any]:
    try:
        return getattr(importlib.import_module("pytorch_optimizer"), found)
    except ImportError:
        raise ValueError(
            f"optimizer.name: {name} comes from pytorch_optimizer, which is not installed: "
            "pip install 'surefoot[train]'"
        ) from None

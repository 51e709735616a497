"""Whether a checkpoint is of the optimizers that are there; their parameters are matched by name, never by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from surefoot.checkpoint.format.match_model import Saved
from surefoot.checkpoint.format.mismatch import DoesNotFit, few
from surefoot.checkpoint.format.param_names import Held, Names

ORDERED = frozenset({"LBFGS"})
"""Classes that keep all their parameters in one row, so that their order counts."""


@dataclass(slots=True)
class Regrouped:
    """What goes to one optimizer, still as it was told."""

    groups: list[Any] = field(default_factory=list)
    """The options of each group that is there; None where none were saved."""
    states: dict[str, Any] = field(default_factory=dict)
    """By the name of the parameter."""
    notes: list[str] = field(default_factory=list)


def fit_optimizer(saved: Saved, k: int, held: Held, optimizer: Optimizer) -> Regrouped:
    """Match one optimizer with what is saved for it; raises DoesNotFit."""
    told = saved.own["optimizers"][k]
    if told["class"] != held.kind:
        raise DoesNotFit(
            f"{saved.where}: optimizer {k} is {held.kind}, and {told['class']} was saved, whose state means other"
            f" things. Build {told['class']}, or load the weights alone"
        )
    if len(told["groups"]) != len(held.groups):
        raise DoesNotFit(
            f"{saved.where}: optimizer {k} has {len(held.groups)} parameter groups, and {len(told['groups'])} were"
            " saved. Build the groups it was saved with, or load the weights alone"
        )
    found = Regrouped()
    was = [[str(name) for name in group["params"]] for group in told["groups"]]
    _compare_params(saved, k, was, held)
    if was != held.groups:
        found.notes.append(_said(saved, k, was, held))
    for g, names in enumerate(held.groups):
        found.groups.append(told["groups"][_origin(g, names, was)].get("options"))
    _compare_options(saved, k, found, optimizer)
    merged: dict[str, Any] = {}
    for one in (saved.own, *saved.told):
        for name, state in one["optimizers"][k]["state"].items():
            merged.setdefault(name, state)
    mine = {name for group in held.groups for name in group}
    found.states = {name: state for name, state in merged.items() if name in mine}
    return found


def count_optimizers(saved: Saved, names: Names) -> None:
    there, then = len(names.optimizers), {len(told["optimizers"]) for told in saved.told}
    if then != {there}:
        raise DoesNotFit(
            f"{saved.where} was saved with {max(then)} optimizers, and {there} are there. Hand in the same ones, in the"
            " same order"
        )


def _compare_params(saved: Saved, k: int, was: Sequence[Sequence[str]], held: Held) -> None:
    then, now = {n for g in was for n in g}, {n for g in held.groups for n in g}
    told = [f"new: {few(sorted(now - then))}"] if now - then else []
    told += [f"gone: {few(sorted(then - now))}"] if then - now else []
    if told:
        raise DoesNotFit(
            f"{saved.where}: optimizer {k} does not hold the parameters it was saved with. {'; '.join(told)}. Hand it"
            " the same ones, or load the weights alone"
        )


def _compare_options(saved: Saved, k: int, found: Regrouped, optimizer: Optimizer) -> None:
    """Options that came or went with a version of torch are fine; a state needs those it was made with."""
    for group, options in zip(optimizer.param_groups, found.groups, strict=True):
        if options is None:
            continue
        if not isinstance(options, dict):
            raise DoesNotFit(f"{saved.where}: the options of optimizer {k} make no sense. Take an older checkpoint")
        new = [name for name in group if name != "params" and name not in options]
        if new:
            found.notes.append(f"optimizer {k}: {few(new)} were not saved, and stay as they are")


def _said(saved: Saved, k: int, was: Sequence[Sequence[str]], held: Held) -> str:
    regrouped = [sorted(g) for g in was] != [sorted(g) for g in held.groups]
    if held.kind in ORDERED:
        raise DoesNotFit(
            f"{saved.where}: the parameters of optimizer {k} are in another order, and {held.kind} counts on it. Hand"
            " them in as they were"
        )
    if not regrouped:
        return f"optimizer {k}: its parameters are in another order, and were matched by name"
    return (
        f"optimizer {k}: its parameters are grouped otherwise, and were matched by name. Each group has the options of"
        " the one its first parameter was in; schedulers go by the number of a group"
    )


def _origin(g: int, names: Sequence[str], was: Sequence[Sequence[str]]) -> int:
    """The saved group that one resembles."""
    if not names:
        return g
    return next((i for i, group in enumerate(was) if names[0] in group), g)


def held_by(optimizer: Optimizer, names: Names) -> Mapping[str, Tensor]:
    """The parameters of an optimizer by name."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {names.of[id(p)]: p for p in params if id(p) in names.of}

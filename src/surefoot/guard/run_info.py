"""How a run introduces itself: to its judge, in `run.json`, and in a journal that all processes open together."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from surefoot.gate.clip import ClipOption
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.journal.lock import RunDirectoryInUse
from surefoot.journal.writer import Journal
from surefoot.judge.multi_optimizer import AnyJudge, make_judge
from surefoot.judge.policy import Policy
from surefoot.measure.cross_rank import Ranks
from surefoot.measure.environment import describe

log = logging.getLogger("surefoot")
_PROPORTIONAL = (torch.optim.SGD, torch.optim.ASGD, torch.optim.LBFGS)
"""Optimizers whose updates grow with the gradients."""
_MORE: ContextVar[Mapping[str, Any]] = ContextVar("more", default=MappingProxyType({}))
"""What whoever attaches tells of the run besides."""


def judge_for(model: nn.Module, policy: Policy, rounds: StepPipeline) -> AnyJudge:
    """A judge that knows what the tensors of this run are."""
    names, known = rounds.meter.ranks.from_first((rounds.layout.names, _judged(model, rounds)))
    return make_judge(policy, names, **known)


def _judged(model: nn.Module, rounds: StepPipeline) -> dict[str, Any]:
    """What a judge is told of a run besides the names of its tensors; written down, so that it can be told again."""
    holders = {id(p): type(m).__name__ for m in model.modules() for p in m._parameters.values() if p is not None}
    optimizers = [getattr(g.optimizer, "optim", g.optimizer) for g in rounds.gates]  # inside a sharded one
    owned = rounds.layout.scopes[-1].stop
    scopes = [[span.start, span.stop] for span in rounds.layout.scopes]
    return {
        "kinds": [holders.get(id(p), "").removeprefix("FSDP") for p in rounds.layout.params],
        "owned": owned,
        "values": sum(rounds.layout.numels[:owned]),
        "first": max(map(first_update, optimizers)),
        "adaptive": not any(isinstance(o, _PROPORTIONAL) for o in optimizers),
        "alone": rounds.meter.ranks.world == 1,
        "buffers": list(rounds.buffers.names),
    } | ({"scopes": scopes} if len(scopes) > 1 else {})


def first_update(optimizer: Optimizer) -> float:
    """How far an update of an optimizer that divides by past gradients moves each weight at its start, in rates: the
    very first, or the largest of the first ones where momentum adds them up and gradients stay as they are."""
    if isinstance(optimizer, torch.optim.RMSprop):  # its average of squares begins at 0, and is not corrected for that
        return max(_largest(group["alpha"], group["momentum"]) for group in optimizer.param_groups)
    return 1.0


def _largest(alpha: float, momentum: float) -> float:
    pushed = before = 0.0
    for step in itertools.count(1):
        before, pushed = pushed, momentum * pushed + (1 - alpha**step) ** -0.5
        if pushed <= before or step * (1 - alpha) > 1:
            break
    return max(before, pushed)


def config_of(model: nn.Module, clip: ClipOption, policy: Policy, rounds: StepPipeline) -> dict[str, Any]:
    """What stands in `run.json`."""
    optimizers = [
        {
            "class": type(g.optimizer).__name__,
            "way": g.veto_method,
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in g.optimizer.param_groups],
        }
        for g in rounds.gates
    ]
    config = {
        "policy": asdict(policy),
        "judged": _judged(model, rounds),
        "clip": clip,
        "model": type(model).__name__,
        "parameters": sum(rounds.layout.numels),
        "tensors": len(rounds.layout.names),
        "optimizers": optimizers,
        "processes": rounds.meter.ranks.world,
    }
    told = {"config": config, "data": None} | describe(rounds.device)
    for name, more in _MORE.get().items():
        known = told.get(name)
        told[name] = {**known, **more} if isinstance(known, Mapping) and isinstance(more, Mapping) else more
    return told


@contextmanager
def introduced(more: Mapping[str, Any]) -> Iterator[None]:
    """Whatever is attached in here has this in its `run.json` too; what both tell of one thing is told together."""
    before = _MORE.set(more)
    try:
        yield
    finally:
        _MORE.reset(before)


def open_together(ranks: Ranks, run_dir: str | os.PathLike[str], info: dict[str, Any]) -> Journal:
    """The first process takes the directory; the others follow it, in its failure too and in its count of attempts."""
    opening = functools.partial(Journal, run_dir, rank=ranks.rank, info=info, on_failure=_tell_failure)
    journal, wrong = None, None
    if ranks.rank == 0:
        try:
            journal = _open_again(opening)
        except ValueError as error:
            wrong = error
    said = ranks.from_first(str(wrong) if wrong else None)
    if said is not None:
        raise wrong or ValueError(said)
    journal = journal or opening()
    journal.last_attempt = ranks.from_first(journal.last_attempt)
    return journal


def _open_again(opening: Callable[[], Journal]) -> Journal:
    try:
        return opening()
    except RunDirectoryInUse:
        gc.collect()  # an earlier guard of this process may only be waiting to be collected
        return opening()


def _tell_failure(reason: str) -> None:
    log.error("surefoot: the journal has stopped, training and protection go on: %s", reason)

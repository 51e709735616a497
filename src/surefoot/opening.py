"""How a run introduces itself: what stands in `run.json`, and a journal that all processes open together."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from surefoot.gate.clip import ClipOption
from surefoot.journal.lock import RunDirectoryInUse
from surefoot.journal.writer import Journal
from surefoot.judge.policy import Policy
from surefoot.measure.environment import describe
from surefoot.measure.ranks import Ranks
from surefoot.rounds import Rounds

log = logging.getLogger("surefoot")


def config_of(model: nn.Module, clip: ClipOption, policy: Policy, rounds: Rounds) -> dict[str, Any]:
    """What stands in `run.json`."""
    optimizers = [
        {
            "class": type(g.optimizer).__name__,
            "way": g.way,
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in g.optimizer.param_groups],
        }
        for g in rounds.gates
    ]
    config = {
        "policy": {name: getattr(policy, name) for name in policy.__slots__},
        "clip": clip,
        "model": type(model).__name__,
        "parameters": sum(rounds.layout.numels),
        "tensors": len(rounds.layout.names),
        "optimizers": optimizers,
        "processes": rounds.meter.ranks.world,
    }
    return {"config": config, "data": None} | describe(rounds.device)


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

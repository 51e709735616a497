"""Describes a run for the judge and for `run.json`, and opens the journal on all ranks."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from surefoot.alarms.alarm_process import start_alarms
from surefoot.alarms.alarm_target import redacted
from surefoot.cases.model_family import family_of
from surefoot.gate.veto import VetoMethod, has_fused_form, on_accelerator
from surefoot.guard.context import GuardContext
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.old_cases import read_old_cases
from surefoot.guard.sample_bans import BansSamples
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.journal.lock import RunDirectoryInUse
from surefoot.journal.writer import Journal
from surefoot.judge.multi_optimizer import make_judge
from surefoot.measure.cross_rank import Ranks
from surefoot.measure.resources import StepTimer, describe_environment
from surefoot.records import Note
from surefoot.sinks.sink_feed import SinkFeed

log = logging.getLogger("surefoot")
_PROPORTIONAL = (torch.optim.SGD, torch.optim.ASGD, torch.optim.LBFGS)
"""Optimizers whose updates grow with the gradients."""


def open_metrics_reader(context: GuardContext, pipeline: StepPipeline, timer: StepTimer) -> MetricsReader:
    """Open the journal and record how the run is attached; the journal is closed with the first optimizer, should
    nobody close the guard."""
    ranks, layout = pipeline.grad_stats.ranks, pipeline.layout
    names, judged = ranks.broadcast((layout.names, _judge_info(context.model, pipeline)))
    judge = make_judge(context.policy, names, **judged)
    journal = _open_journal(ranks, context.run_dir, _run_json(context, pipeline))
    weakref.finalize(context.optimizers[0], journal.close)
    _open_sinks(context, journal)
    start_alarms(context.alarms, journal)
    reader = MetricsReader(
        journal,
        judge,
        policy=context.policy,
        timer=timer,
        order=pipeline.order,
        steps_of=context.steps_of,
        verbosity=context.verbosity,
    )
    reader.step = context.step
    journal.layout(layout.names, layout.numels)
    if pipeline.system_missing and journal.rank == 0:
        log.info("surefoot: %s", pipeline.system_missing)
        reader.note("machine", pipeline.system_missing, attempt=journal.last_attempt + 1)
    if context.cases is not None and journal.rank == 0:  # it writes all diagnoses, and decides what is tried first
        _read_cases(reader, context, names, judged["kinds"])
    reader.note("attached", "; ".join(g.veto_reason for g in pipeline.gates), attempt=journal.last_attempt + 1)
    for gate in pipeline.gates:
        if gate.veto_method is VetoMethod.HOST and on_accelerator(layout.params) and journal.rank == 0:
            log.log(
                logging.WARNING if has_fused_form(gate.optimizer) else logging.INFO, "surefoot: %s", gate.veto_reason
            )
    return reader


def _read_cases(reader: MetricsReader, context: GuardContext, names: list[str], kinds: list[str]) -> None:
    """Read the old cases that this run was attached with; a failure is a warning."""
    assert context.cases is not None
    optimizer = type(context.optimizers[0]).__name__
    family = family_of(names, kinds)
    reader.old_cases, text = read_old_cases(context.cases, context.run_dir, family=family, optimizer=optimizer)
    reader.note("cases", text, attempt=reader.journal.last_attempt + 1)
    log.log(logging.WARNING if reader.old_cases is None else logging.INFO, "surefoot: %s", text)


# -- run.json


def _judge_info(model: nn.Module, pipeline: StepPipeline) -> dict[str, Any]:
    """What a judge needs besides the names of the tensors; written to `run.json`, so that a run can be judged again."""
    owners = {id(p): type(m).__name__ for m in model.modules() for p in m._parameters.values() if p is not None}
    optimizers = [getattr(g.optimizer, "optim", g.optimizer) for g in pipeline.gates]  # inside a sharded one
    owned = pipeline.layout.optimizer_spans[-1].stop
    scopes = [[span.start, span.stop] for span in pipeline.layout.optimizer_spans]
    return {
        "kinds": [owners.get(id(p), "").removeprefix("FSDP") for p in pipeline.layout.params],
        "owned": owned,
        "values": sum(pipeline.layout.numels[:owned]),
        "first": max(map(first_update, optimizers)),
        "adaptive": not any(isinstance(o, _PROPORTIONAL) for o in optimizers),
        "alone": pipeline.grad_stats.ranks.world_size == 1,
        "buffers": pipeline.buffer_names,
    } | ({"scopes": scopes} if len(scopes) > 1 else {})


def first_update(optimizer: Optimizer) -> float:
    """How far, in multiples of the lr, an optimizer that divides by past gradients moves each weight at its start.

    That is its very first update, or the largest of the first ones where momentum adds them up and gradients stay the
    same.
    """
    if isinstance(optimizer, torch.optim.RMSprop):  # its mean of squares starts at 0, without bias correction
        return max(_largest_update(group["alpha"], group["momentum"]) for group in optimizer.param_groups)
    return 1.0


def _largest_update(alpha: float, momentum: float) -> float:
    update = before = 0.0
    for step in itertools.count(1):
        before, update = update, momentum * update + (1 - alpha**step) ** -0.5
        if update <= before or step * (1 - alpha) > 1:
            break
    return max(before, update)


def _run_json(context: GuardContext, pipeline: StepPipeline) -> dict[str, Any]:
    optimizers = [
        {
            "class": type(g.optimizer).__name__,
            "way": g.veto_method,
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in g.optimizer.param_groups],
        }
        for g in pipeline.gates
    ]
    config = {
        "policy": asdict(context.policy),
        "judged": _judge_info(context.model, pipeline),
        "clip": context.clip,
        "model": type(context.model).__name__,
        "parameters": sum(pipeline.layout.numels),
        "tensors": len(pipeline.layout.names),
        "optimizers": optimizers,
        "processes": pipeline.grad_stats.ranks.world_size,
        "alarms": [target.name for target in context.alarms],
    }
    if isinstance(context.loader, BansSamples):
        config["num_samples"] = context.loader.num_samples
    info = {"config": config, "data": None} | describe_environment(pipeline.device)
    for name, extra in context.run_info.items():
        value = info.get(name)
        info[name] = {**value, **extra} if isinstance(value, Mapping) and isinstance(extra, Mapping) else extra
    return redacted(info, context.alarms)


# -- the journal


def _open_journal(ranks: Ranks, run_dir: Path, info: dict[str, Any]) -> Journal:
    """Rank 0 opens the directory first; if that fails, all ranks raise. All continue from its count of attempts."""
    open_journal = functools.partial(Journal, run_dir, rank=ranks.rank, info=info, on_failure=_log_failure)
    journal, error = None, None
    if ranks.rank == 0:
        try:
            journal = _open_or_collect(open_journal)
        except ValueError as reason:
            error = reason
    message = ranks.broadcast(str(error) if error else None)
    if message is not None:
        raise error or ValueError(message)
    journal = journal or open_journal()
    journal.last_attempt = ranks.broadcast(journal.last_attempt)
    return journal


def _open_sinks(context: GuardContext, journal: Journal) -> None:
    """The first rank feeds the sinks from what the journal receives."""
    if journal.rank != 0 or not context.sinks:
        return

    def report(sentence: str) -> None:
        log.warning("surefoot: %s", sentence)
        journal.event(Note(step=-1, attempt=-1, name="sink", detail=sentence))

    try:
        opened = [(choice, choice.open(journal.run_dir)) for choice in context.sinks]
    except BaseException:
        journal.close()
        raise
    journal.companions += [SinkFeed(choice, sink, report) for choice, sink in opened]


def _open_or_collect(open_journal: Callable[[], Journal]) -> Journal:
    try:
        return open_journal()
    except RunDirectoryInUse:
        gc.collect()  # an earlier guard of this process may only be waiting to be collected
        return open_journal()


def _log_failure(reason: str) -> None:
    log.error("surefoot: the journal has stopped, training and protection go on: %s", reason)

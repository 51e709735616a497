"""Healthy runs of the large decoder that look suspicious: surefoot must leave them alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks.scale.scale_run import MIN_LR_RATIO, ScaleRun
from benchmarks.scale.scale_scenario import TWIN, ScaleScenario, control
from benchmarks.scale.texts import Text
from surefoot.models.decoder import CausalSelfAttention


def _no_fault(run: ScaleRun, at: int) -> None:
    """Nothing is planted; all faults are scored against this run."""


FAULT_FREE = ScaleScenario(name=TWIN, plant=_no_fault)


@control(from_birth=True, seed=1)
def other_seed(run: ScaleRun, at: int) -> None:
    """Other batches."""


def _new_text(run: ScaleRun, at: int, text: Text) -> None:
    """Train on another text for good; the run is evaluated on that text from its start on."""
    run.text_of = lambda step: text.train if step >= at else run.texts.source.train
    run.eval_text = text


@control()
def prose_for_good(run: ScaleRun, at: int) -> None:
    """The text changes from Python source to English prose."""
    _new_text(run, at, run.texts.prose)


@control()
def json_for_good(run: ScaleRun, at: int) -> None:
    """The text changes from Python source to JSON records, which nothing resembled so far."""
    _new_text(run, at, run.texts.records)


@control()
def hard_batches(run: ScaleRun, at: int) -> None:
    """Every twelfth batch is JSON records, which the model has hardly seen."""
    run.text_of = lambda step: (run.texts.records if step >= at and (step - at) % 12 == 0 else run.texts.source).train


@control()
def batch_doubled(run: ScaleRun, at: int) -> None:
    """The batch is twice as large."""

    def double(step: int) -> None:
        run.rows = run.size.batch * (2 if step >= at else 1)

    run.before_hooks.append(double)


@control()
def lr_restart(run: ScaleRun, at: int) -> None:
    """The learning rate restarts at zero, warms up again and follows a new cosine."""

    def restarted(step: int) -> float:
        if step < at:
            return run.cosine(step)
        done = (step - at) / (run.size.updates - at)
        warmup = min(1.0, (step - at + 1) / run.size.warmup)
        return warmup * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * 0.5 * (1 + math.cos(math.pi * done)))

    run.schedule = restarted


@control()
def eval_pauses(run: ScaleRun, at: int) -> None:
    """Every 30 updates the loop pauses for a long evaluation and for forward passes without a backward."""
    period = run.size.scaled(30)

    def pause(step: int) -> None:
        if step >= at and (step - at) % period == 0:
            run.eval_loss(run.size.final_batches)
            with torch.no_grad():
                run.loss(run.model, run.batch(step))

    run.before_hooks.append(pause)


@control()
def dropout_on(run: ScaleRun, at: int) -> None:
    """Dropout of 0.1 is switched on."""

    def switch_on(step: int) -> None:
        for module in run.model.modules() if step == at else ():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
            elif isinstance(module, CausalSelfAttention):
                module.dropout = 0.1

    run.before_hooks.append(switch_on)

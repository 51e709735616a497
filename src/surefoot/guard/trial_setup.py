"""Decides on attach whether trials are run, and says why where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surefoot.checkpoint.train_state import TrainState
from surefoot.gate.veto import VetoMethod
from surefoot.guard.context import GuardContext
from surefoot.guard.hooks import HasSwitch
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.guard.trial_control import TrialControl
from surefoot.judge.judge import Judge
from surefoot.trials.data_parallel import unsupported_layout
from surefoot.trials.rank_agreement import RankAgreement

NO_STEP_FN = (
    "no step_fn was given, so the rules act alone; with step_fn=(model, batch) -> loss surefoot tries out what helps "
    "before it acts, and a rewind loses almost no update"
)


def make_trials(
    guard: HasSwitch,
    context: GuardContext,
    pipeline: StepPipeline,
    reader: MetricsReader,
    train_state: TrainState,
    loss_scale: Callable[[], Any],
    all_ranks_guarded: Callable[[], bool],
) -> TrialControl | str:
    """Trials for this run, or why none are run; an empty string where none are wanted. All ranks must call this."""
    agreement = RankAgreement(pipeline.grad_stats.ranks)
    reason = _why_not(context, pipeline, reader)
    if agreement.any(reason is not None):
        return "trials are not run: another rank runs none, so the rules act alone" if reason is None else reason
    judge, step_fn = reader.judge, context.step_fn
    assert isinstance(judge, Judge)
    assert step_fn is not None
    return TrialControl(guard, context, step_fn, reader, judge, train_state, loss_scale, agreement, all_ranks_guarded)


def _why_not(context: GuardContext, pipeline: StepPipeline, reader: MetricsReader) -> str | None:
    """Why no trials are run; an empty string where none are wanted, None if they are."""
    policy, ranks = context.policy, pipeline.grad_stats.ranks
    if policy.observe or policy.trial_seconds <= 0 or context.snapshot_memory == 0:
        return ""
    if context.step_fn is None:
        return NO_STEP_FN
    if len(context.optimizers) > 1 or not isinstance(reader.judge, Judge):
        return "trials are not run: the model has several optimizers, so the rules act alone"
    if any(gate.veto_method is VetoMethod.COPY for gate in pipeline.gates):
        return "trials are not run: the optimizer needs a closure, so the rules act alone"
    reason = None if ranks.world_size == 1 else unsupported_layout(context.model, context.optimizers, ranks)
    return None if reason is None else f"trials are not run: {reason}, so the rules act alone"

"""What is overridden after a trial: what answers to what it found, and nothing else."""

from __future__ import annotations

from surefoot.records import Cause, StepOverrides
from surefoot.trials.branches import Branch
from surefoot.trials.conclusion import LASTING_GRADIENT_CAUSES, WEIGHT_CAUSES
from surefoot.trials.restart import RestartTrial

SETTING_CAUSES = frozenset({Cause.LEARNING_RATE, Cause.SCHEDULE, Cause.MOMENTUM})


def overrides_for(causes: frozenset[Cause], overrides: StepOverrides | None) -> StepOverrides | None:
    """Of the overrides that go with a decision, those that answer what a trial found; all where it found no cause."""
    if overrides is None or not causes:
        return overrides
    if causes == LASTING_GRADIENT_CAUSES:  # what backward adds to is not what it should be: zero it
        return StepOverrides(zero_all_grads=True, lasting_lr_factor=overrides.lasting_lr_factor)
    if causes & (WEIGHT_CAUSES | {Cause.OPTIMIZER_STATE}) and Cause.ACCUMULATION not in causes:
        return StepOverrides(lasting_lr_factor=overrides.lasting_lr_factor)  # it came from outside, and is over
    if causes <= SETTING_CAUSES:
        return StepOverrides(
            max_lr=overrides.max_lr,
            max_momentum=overrides.max_momentum,
            lasting_lr_factor=overrides.lasting_lr_factor,
        )
    return overrides


def overrides_of_restart(trial: RestartTrial, best: Branch, before: StepOverrides, lr: float) -> StepOverrides:
    """What the trial shows to be too high are the learning rates that the run began with: where the loop itself has
    lowered them since by as much, they are only capped."""
    lasting, clip = before.lasting_lr_factor, (trial.max_norm,) if best.clip else ()
    if lr_fell(trial, best, before, lr):
        return StepOverrides(lasting_lr_factor=lasting, max_lr=(best.lr_factor * trial.max_lr,), clip=clip)
    return StepOverrides(lasting_lr_factor=lasting * best.lr_factor, clip=clip)


def lr_fell(trial: RestartTrial, best: Branch, before: StepOverrides, lr: float) -> bool:
    """The loop itself, which now sets this learning rate, has lowered it by at least as much as the branch does."""
    return best.lr_factor < 1 and 0 < lr * before.lasting_lr_factor <= best.lr_factor * trial.max_lr

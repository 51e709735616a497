"""`attach`: the rooms wired to one model and its optimizers by hooks. It holds no rule of its own.

A step, seen from here:

    watch            the loss is handed through, and its backward will tell when it ends
    backward ends    all gradients are measured in one pass                            -> Rounds, Meter
    before the step  the gate decides, and clips or refuses                            -> Rounds, Gate
    after the step   buffers settle and the numbers are sent off                       -> Rounds, Mailbox
                     those of two steps ago are read, judged, written down             -> Desk, Judge, Journal
    the round ends   what was decided is carried out, and a state is taken now and then -> Footing, act, Ring
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.gate.clip import ClipOption
from surefoot.guard import validate
from surefoot.guard.attached import GUARDED, AttachedGuard
from surefoot.guard.guard import Guard, OffGuard
from surefoot.judge.policy import Policy

__all__ = ["Guard", "OffGuard", "attach"]


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    run_dir: str | os.PathLike[str] | None = None,
    clip: ClipOption = None,
    policy: str | Policy = "protect",
    scheduler: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    ring: float | str | None = None,
    loader: Any = None,
    resume: bool = False,
    step_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    steps_of: Optimizer | None = None,
    **unknown: Never,
) -> Guard:
    """Watch a model's training and refuse bad updates; hand the loss through `guard.watch` and train as before.

    `clip` is None, a number (global norm), "adaptive", {"value": x}, or a list with one of these for each parameter
    group. `policy` is "protect", "observe" (touches nothing, tells what it would have done) or a `surefoot.Policy`.
    `scheduler` (one or a list), `scaler` (the GradScaler in use) and `extra` ({name: anything with a state_dict}, such
    as averaged weights) go back with the run when it has to. `ring` is the memory that states to go back to may take,
    such as "8GB"; False keeps none. With `resume` the run is saved to `run_dir` as it goes, and goes on from the newest
    checkpoint that is whole; `loader` is where its batches come from, so that the data goes on too, and `for batch in
    guard.batches(loader):` makes it go on exactly where the loop draws random numbers of its own. `step_fn` (model,
    batch -> loss) lets surefoot run a batch again: a checkpoint then holds the last batch and its loss, and a resume is
    proven by having that loss again.

    With several optimizers `guard.step` counts iterations of the loop: optimizers that step on one backward share an
    iteration, and those that step in turn (critic, generator) end one with the last of them. The order is recognised
    once it has come twice, uneven ones too: five critic steps and one generator step are one iteration. In a loop whose
    iteration is one critic step, and every fifth time a generator step besides, name what counts: `steps_of=critic_opt`
    makes `guard.step` the number of that optimizer's updates. Runs are saved, and go back, at the end of such a cycle
    only. With SUREFOOT=off in the environment nothing happens at all.
    """
    if validate.switched_off():
        return OffGuard()
    validate.check_options(unknown)
    model = validate.check_model(model)
    optimizers = validate.check_optimizers(optimizer, model)
    validate.check_free(optimizers, GUARDED)
    return AttachedGuard(
        model,
        optimizers,
        run_dir=validate.check_run_dir(run_dir),
        clip=clip,
        policy=validate.check_policy(policy),
        scheduler=validate.check_scheduler(scheduler),
        scaler=scaler,
        extra=validate.check_extra(extra),
        ring=validate.check_ring(ring),
        loader=loader,
        resume=validate.check_resume(resume, run_dir, policy),
        step_fn=validate.check_step_fn(step_fn),
        steps_of=validate.check_steps_of(steps_of, optimizers),
    )

"""`surefoot.attach`: wires one model and its optimizers to everything else by hooks. This is the map; read it first.

One step of the training loop, in order. On the left what the loop does, on the right what its hook calls:

    next(loader)          Checkpointer.after_fetch        with resume=True: saves if due, ends the run on a signal
    model(batch)          AttachedGuard.forward_began     times the wait for data; the first time, takes a snapshot
    guard.watch(loss)     AttachedGuard.watch             hooks the loss, so that its backward is seen
    loss.backward()       StepPipeline.backward_ended     measures all gradients in one pass (GradStats)
    optimizer.step()
      pre-hook            Recovery.before_step            sets the overrides in force, if any (lower lr, tighter clip)
                          StepPipeline.decide             the Gate clips the update or vetoes it, on the device
      post-hook           StepPipeline.after_step         restores tainted buffers, sends the numbers to the host
                          MetricsReader.read              reads the numbers of two steps ago: journal, then judge
                          Recovery.iteration_ended        applies what the judge decided; now and then a snapshot
                          Checkpointer.iteration_ended    with resume=True: is a save or a stop due?

Parts that seldom have something to do are not called at every step: an attribute of theirs says whether they have, as
`OverrideApplier.in_force`, `SnapshotRing.watches_updates`, `NanTracer.armed` and `Resumer.caution` do. What a
run does not need is None: the checkpointer without resume=True, the buffer check of a model without buffers, the
exchange between ranks of a single one. `surefoot bench visits` counts the functions that a healthy step goes through.

The host reads numbers two steps late, so that it never waits for the device; only the gate acts within the step. An
attempt whose gradients are gone without a step (overflow with a GradScaler, or discarded by the loop) is recorded by
StepPipeline.discard_attempt at the next forward or backward. Where fetches are not seen (no `guard.batches`), the
checkpointer saves when the next forward begins.

The files, by what they do:

    attached            the order of the calls above (hooks: registering them, internal errors, torch.compile)
    guard, batches      what the user holds: Guard, OffGuard, guard.batches
    context, validate   the arguments of attach, checked once and passed on as one GuardContext
    step_pipeline       one attempted update on the device
    iteration_order     which optimizer steps end an iteration of the loop, with several optimizers
    metrics_reader      numbers from the device -> journal and judge (step_metrics: block -> StepMetrics)
    run_snapshots       when a snapshot is taken (snapshot_interval: how often), and which are good
    recovery            overrides and decisions (trial_control: tries decisions out, with step_fn;
                        trial_setup: where that is possible; rank_barrier: all ranks are there to act together)
    incident_capture    writes what is needed to replay an incident
    guard_state         what the guard has learnt, as checkpoints hold it
    sample_bans         bans the samples to blame, and keeps bans through resumes
    old_cases           finds incidents of earlier runs that are like a new one
    run_info            describes the run for the judge and run.json; opens the journal
    checkpointer        saves: capture_point (when, and the position in the data), resume, emergency_save
    early_checks        with preflight=True: checks the loop on its first batches, then is gone
    preemption          ends the run on a signal, at the same attempt on all ranks (signal_handlers: installing)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.actions.stop import TrainingStopped
from surefoot.gate.clip import ClipOption
from surefoot.guard import validate
from surefoot.guard.attached import AttachedGuard
from surefoot.guard.context import GuardContext
from surefoot.guard.early_checks import report_path
from surefoot.guard.guard import Guard, OffGuard
from surefoot.guard.hooks import GUARDED
from surefoot.judge.policy import Policy
from surefoot.story.verbosity import read_verbosity

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
    snapshot_memory: float | str | None = None,
    loader: Any = None,
    resume: bool = False,
    step_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    steps_of: Optimizer | None = None,
    run_info: Mapping[str, Any] | None = None,
    incident_data: bool = True,
    cases: str | os.PathLike[str] | None = None,
    preflight: bool = False,
    alarms: Any = None,
    sinks: Any = None,
    verbosity: str = "normal",
    step: int = 0,
    on_stop: Callable[[TrainingStopped], None] | None = None,
    **unknown: Never,
) -> Guard:
    """Guard a model's training: pass the loss through `guard.watch`, train as before, and bad updates are refused.

    Args:
        model: The module that is trained.
        optimizer: Its optimizer, or a list of all optimizers that train it.
        run_dir: Directory for the journal and the checkpoints of this run.
        clip: None, a number (global norm), "adaptive", {"value": x}, or a list with one of these per parameter group.
        policy: "protect", "observe" (changes nothing, records what it would have done) or a `surefoot.Policy`.
        scheduler: One scheduler or a list; saved and rewound with the run.
        scaler: The GradScaler in use; saved and rewound with the run.
        extra: {name: object with a state_dict}, such as averaged weights; saved and rewound with the run.
        snapshot_memory: Memory that snapshots to rewind to may take, such as "8GB"; False keeps none.
        loader: Where the batches come from, so that a resumed run continues in the data where it was.
        resume: Save the run to `run_dir` as it trains, and resume from the newest intact checkpoint there. A resume is
            exact if the loop fetches with `for batch in guard.batches(loader):`, even if it draws random numbers.
        step_fn: (model, batch) -> loss. What helps is then tried out on kept batches before anything is done, and a
            rewind loses almost no update; see the guide on trials. Checkpoints hold the last batch and its loss, and a
            resume is verified by computing that loss again.
        steps_of: The optimizer whose updates `guard.step` counts, for loops with several.
        run_info: Your own entries for `run.json`, such as a config; a mapping is merged with what is there by its name.
        incident_data: With `step_fn`: incident bundles in `run_dir` hold weights and batches, so that an incident can
            be replayed; False leaves both out, as when bundles are shared and the data must not be.
        cases: A folder with earlier runs, or a case library that `surefoot cases --export` has written. A diagnosis
            names the incidents there that are most like it, and with `step_fn` what helped in the first of them is the
            first that is tried. Read once, here; a failure is a warning.
        preflight: Check the loop on its first four batches, as `surefoot.preflight` does, and report what is wrong;
            needs `step_fn` for most of it. Nothing is changed.
        alarms: Who hears of what happens: "https://..." (gets JSON), an address that apprise knows, {"command": [...]},
            {"to": "https://...", "levels": ["crash", "stop"]}, or a list of these; see the guide on alarms. By default
            those in SUREFOOT_ALARMS; False for nobody.
        sinks: Where numbers and events go besides the journal: "tensorboard", "wandb", "mlflow", "trackio", an object
            of your own with scalars, text and close, {"to": one of these, "every": 10, "layers": True}, or a list.
        verbosity: What the logger "surefoot" gets about incidents: "normal" logs each once, as a short block; "quiet"
            only a stop and what did not help; "verbose" also every decision. SUREFOOT_VERBOSITY in the environment
            comes before it.
        step: Where `guard.step` starts to count, for a run that another trainer has resumed.
        on_stop: Called with the `TrainingStopped` that says why, instead of raising it, when training on would do no
            good; it should make the loop end. Until it does, all further updates are refused.

    With several optimizers `guard.step` counts iterations of the loop: optimizers that step on one backward share an
    iteration; optimizers that alternate (critic, generator) end one with the last of them. The order is recognised
    after it has occurred twice, also if it is uneven: five critic steps and one generator step are one iteration. If
    your iteration is one critic step, plus a generator step every fifth time, pass `steps_of=critic_opt` to count its
    updates. Runs are saved and rewound only at the end of such a cycle.

    With SUREFOOT=off in the environment, attach does nothing and returns a guard that does nothing.
    """
    if validate.switched_off():
        return OffGuard()
    validate.check_options(unknown)
    if (path := report_path()) is not None:  # the script was started by `surefoot check`
        run_dir, resume, preflight, alarms = path.parent / "run", False, True, False
        sinks = None
    model = validate.check_model(model)
    optimizers = validate.check_optimizers(optimizer, model)
    validate.check_free(optimizers, GUARDED)
    return AttachedGuard(
        GuardContext(
            model=model,
            optimizers=optimizers,
            run_dir=Path(validate.check_run_dir(run_dir)),
            clip=clip,
            policy=validate.check_policy(policy),
            schedulers=validate.check_scheduler(scheduler),
            scaler=scaler,
            extra=validate.check_extra(extra),
            snapshot_memory=validate.check_snapshot_memory(snapshot_memory),
            loader=loader,
            resume=validate.check_resume(resume, run_dir, policy),
            step_fn=validate.check_step_fn(step_fn),
            steps_of=validate.check_steps_of(steps_of, optimizers),
            run_info=validate.check_run_info(run_info),
            incident_data=bool(incident_data),
            cases=validate.check_cases(cases),
            preflight=preflight,
            alarms=validate.check_alarms(alarms),
            sinks=validate.check_sinks(sinks),
            verbosity=read_verbosity(verbosity),
            step=validate.check_first_step(step, resume=resume),
            on_stop=validate.check_on_stop(on_stop),
        )
    )

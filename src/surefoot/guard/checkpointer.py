"""Saves and resumes one attached run: on attach, at intervals, when an incident begins, and when a signal ends it."""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from surefoot.checkpoint.buffers import BufferShadow
from surefoot.checkpoint.dataloader import position_of
from surefoot.checkpoint.manager import CheckpointManager, SaveInterval
from surefoot.checkpoint.rank_rendezvous import RankGroup
from surefoot.checkpoint.replay_check import ReplayCheck
from surefoot.checkpoint.rng import EarlierState
from surefoot.checkpoint.train_state import TrainState
from surefoot.guard import capture_point
from surefoot.guard.batches import HasFetchHook
from surefoot.guard.capture_point import LOADER_KEY, CapturePoint, DataPosition
from surefoot.guard.context import GuardContext
from surefoot.guard.emergency_save import EmergencySaver
from surefoot.guard.metrics_reader import CheckpointEventLog, MetricsReader
from surefoot.guard.preemption import Preemption, RankConsensus
from surefoot.guard.recovery import GATE_MEMORY, Recovery
from surefoot.guard.resume import Resumer
from surefoot.guard.step_pipeline import StepPipeline

log = logging.getLogger("surefoot")
FOLDER = "checkpoints"
_FAILED_RUN_WAIT = 10.0
"""Seconds that a failed run waits for a save under way: other ranks may be gone."""
_POSITION_NOT_SAVED = (
    "surefoot.attach was given no loader, so the position in the data is not saved. Pass loader= to it as well."
)


class Checkpointer:
    """Decides when the run is saved, and with which state."""

    def __init__(
        self,
        context: GuardContext,
        pipeline: StepPipeline,
        reader: MetricsReader,
        recovery: Recovery,
        *,
        shadow: BufferShadow | None,
    ) -> None:
        policy = context.policy
        self._pipeline, self._reader, self._recovery, self._shadow = pipeline, reader, recovery, shadow
        self._loader = context.loader
        ranks = pipeline.grad_stats.ranks
        token = ranks.broadcast(secrets.token_hex(8))
        single = self._single_rank = ranks.world_size == 1
        self._position = DataPosition(context.loader, context.extra)
        self._capture_point = CapturePoint(self._position)
        loader_state = {} if self._position.loader is None else {LOADER_KEY: self._position.loader}
        self._train_state = TrainState(
            context.model,
            context.optimizers,
            scheduler=context.schedulers,
            extra={**context.extra, GATE_MEMORY: recovery, **loader_state},
        )
        self._events = CheckpointEventLog(reader, pipeline)
        self._replay_check = ReplayCheck(context.model, context.step_fn, every=policy.probe_every)
        self._manager = CheckpointManager(
            context.run_dir / FOLDER,
            self._train_state,
            on_event=self._events.record,
            group=RankGroup(ranks.rank, ranks.world_size, token),
            interval=SaveInterval(policy.save_every, policy.save_seconds if single else float("inf")),
            replay_check=self._replay_check,
        )
        self._resumer = Resumer(context, self._manager, events=self._events, reader=reader, recovery=recovery)
        self._emergency = EmergencySaver(
            self._manager, self._train_state, events=self._events, reader=reader, recovery=recovery
        )
        self._consensus = RankConsensus(ranks.rank, ranks.world_size, token)
        self._preemption = Preemption(self._consensus)
        self._timed_saves = SaveInterval(1 << 62, policy.save_seconds) if not single and ranks.rank == 0 else None
        """Rank 0 proposes saves by the clock: clocks differ, steps do not."""
        self._due: str | None = None
        """What to do before the next forward pass: take (copy, write later), save (now), or stop:SIGNAL."""
        self._inexact: tuple[str, ...] = ()
        """Why the state captured last may not lead to the same losses again."""
        self._reported: set[str] = set()
        """Reasons for inexactness that this process has reported."""
        self._sees_forward_end = False
        """Whether forward hooks run; they do not in a compiled model."""
        self._other_thread_fetches = False
        self._prepared = False
        self._no_save_running = single
        """No rank is writing a checkpoint, as all of them know."""
        self._save_attempt = -1
        """The attempt after which a save last began."""

    def start(self) -> None:
        """Resume from the newest intact checkpoint, if there is one, and handle signals from here on."""
        self._train_state.scaler = self._pipeline.scaler
        if not isinstance(self._loader, HasFetchHook):
            self._events.record("exact_if", capture_point.EXACT_IF)
        self._report_inexact(self._position.position.warning_for(announced=True))
        resumed = self._resumer.resume()
        self._capture_point.start(self._pipeline, resumed=resumed is not None)
        self._preemption.install()
        self._recovery.on_rewind, self._recovery.on_stop = self._rewound, self._before_stop
        if self._shadow is not None:
            self._shadow.reset()

    # -- 1. fetching a batch

    def check_loader(self, loader: Any) -> None:
        """The loop iterates over this loader; warn if `attach` was given none, as the position is not saved then."""
        if loader is None or self._loader is not None or isinstance(loader, range):
            return
        position = position_of(loader)
        saveable = position.stateful is not None
        self._report_inexact(_POSITION_NOT_SAVED if saveable else position.warning_for(announced=True))

    def fetched_in_other_thread(self) -> None:
        self._other_thread_fetches = True

    def before_fetch(self) -> None:
        """The loop is about to fetch its next batch: the point at which a resumed run begins."""
        if not torch.is_grad_enabled():  # a batch of an evaluation
            return
        if self._single_rank and self._preemption.signal is not None and self._capture_point.between_updates:
            self._preemption.propose(self._pipeline.attempt)
            self._due = self._consensus.take_due(self._pipeline.attempt) or self._due
        self._capture_point.before_fetch(self._pipeline, due=self._due is not None)

    def after_fetch(self) -> None:
        """The loop has a batch. At the end of an epoch there is none, and a save waits for the next epoch's first."""
        if self._due is not None and self._capture_point.exact and torch.is_grad_enabled():
            self._do_due(self._capture_point.at_fetch())

    # -- 2. forward

    def forward_began(self) -> None:
        """In training the loop has done what follows a step, such as the scheduler's: the run can be saved now.

        The next batch is already fetched, and a resumed run will fetch it again.
        """
        if torch.is_grad_enabled():
            self._save_if_due(forward_seen=True)
        else:
            self._eval_forward_began()

    def _eval_forward_began(self) -> None:
        """During an evaluation between two updates a signal need not wait for its end."""
        if not self._capture_point.between_updates:
            return
        self._capture_point.eval_began(self._pipeline)
        if not self._preemption.requested or self._capture_point.worth_waiting:
            return
        number = self._preemption.signal_during_eval(self._pipeline.attempt)
        if number is not None:
            self._due = None
            self._save_began()
            self._save_now(f"stop:{number}", self._capture_point.at_eval(self._pipeline))

    def forward_ended(self) -> None:
        """A forward pass in training is over."""
        self._sees_forward_end = True
        self._capture_point.forward_ended(self._pipeline)

    def loss_watched(self, batch: Any = None) -> None:
        """A loss was computed; in a compiled model, whose forward hooks do not run, this stands for the forward."""
        self._save_if_due(forward_seen=False)
        if not self._sees_forward_end:
            self._capture_point.forward_ended(self._pipeline)
        if not self._replay_check.disabled_reason:
            self._replay_check.observe(batch)

    def _save_if_due(self, *, forward_seen: bool) -> None:
        point = self._capture_point
        due = self._due is not None and point.between_updates
        if due or point.checks_rng:
            used = point.generators_used(self._pipeline)
            self._report_inexact(capture_point.RNG_USED.format(", ".join(used)) if used else None)
        if due:
            earlier = point.at_forward(self._pipeline)
            if earlier is not None:
                if not forward_seen and self._shadow is not None:
                    earlier = replace(earlier, buffers=self._shadow.pairs)
                same_batch = capture_point.SAME_BATCH in earlier.inexact
                self._report_inexact(capture_point.SAME_BATCH if same_batch else None)
                self._do_due(earlier)
        point.forward_began()

    # -- 3. optimizer.step()

    def before_step(self) -> None:
        self._manager.before_update()
        self._pipeline.set_saving(not self._manager.idle)

    def row_read(self) -> None:
        """A row was read and judged."""
        reader = self._reader
        if reader.last_attempt > self._save_attempt:
            self._no_save_running = not reader.save_running
        self._manager.metrics_read(reader.step, reader.complete_attempt, self._guard_state)
        self._manager.mark_healthy(reader.judge.proven)
        quiet = reader.judge.quiet
        if quiet != self._emergency.quiet:
            self._emergency.quiet_changed(quiet)
        if reader.ranks_alive < self._pipeline.grad_stats.ranks.world_size:  # a sharded model needs all of its ranks
            self._replay_check.disabled_reason = "a rank has lost its protection"
        if self._resumer.caution is not None:
            self._resumer.relax()

    def iteration_ended(self) -> None:
        """All optimizers have stepped and decisions are applied: find out what is due before the next forward."""
        attempt = self._pipeline.attempt
        if not self._prepared:
            self._prepared = True
            self._manager.preallocate()
            self._save_began()
            if not self._capture_point.fetches_announced:
                self._report_inexact(self._position.position.warning_for(announced=False))
        self._manager.poll()
        if not self._single_rank or self._preemption.signal is not None:
            self._find_agreed(attempt)
        step = self._reader.step
        if self._emergency.save_wanted or self._emergency.saving is not None:
            no_save_running = self._manager.idle if self._single_rank else self._no_save_running
            if self._emergency.iteration_ended(self._position.loader_state, no_save_running=no_save_running):
                self._save_began()
        # During an incident a state is worth little; but a doubtful checkpoint is better than none for long.
        worthwhile = self._reader.judge.quiet or self._manager.interval.overdue(step)
        if self._due is None and worthwhile and self._manager.due(step, free=self._no_save_running):
            self._due = "take"
        self._find_inexact()

    def _find_agreed(self, attempt: int) -> None:
        """Find what all ranks have agreed to do: a signal reached one of them, or it is time to save."""
        self._preemption.propose(attempt)
        if self._timed_saves is not None and self._timed_saves.due(0):
            self._timed_saves.reset(0)
            self._consensus.propose("save", attempt)
        self._due = self._consensus.take_due(attempt) or self._due

    def _find_inexact(self) -> None:
        point = self._capture_point
        used = point.generators_used_before_step(self._pipeline)
        self._report_inexact(capture_point.RNG_USED_BEFORE_STEP.format(", ".join(used)) if used else None)
        if point.iteration_ended(self._pipeline, due=self._due is not None):
            self._report_inexact(capture_point.FETCHES_AHEAD)
        if self._other_thread_fetches:
            self._report_inexact(capture_point.OTHER_THREAD)

    def withdraw(self, attempt: int) -> None:
        """This attempt did not end an iteration after all: a state taken there is not written, and a signal waits."""
        self._due = None if self._due == "take" else self._due
        self._capture_point.between_updates = False
        self._manager.withdraw_capture(attempt)

    def pipeline_replaced(self, pipeline: StepPipeline) -> None:
        """The optimizers hold other parameters now."""
        self._pipeline = self._events.pipeline = pipeline

    def report(self, values: Mapping[str, float]) -> None:
        self._manager.metrics |= values

    def _rewound(self, attempt: int) -> None:
        """The run is again as it was after this attempt: checkpoints saved since may be damaged."""
        self._manager.mark_suspect(attempt, "the run was rewound to before it")

    def _before_stop(self) -> None:
        """The judge stops the run."""
        self._save_began()
        self._emergency.before_stop(self._save)

    def save_failed_update(self) -> bool:
        """The update in progress cannot be made, and nothing of it was applied: save the run as it was before it.

        Not with several ranks, as the others are elsewhere; returns whether the run is saved.
        """
        if not self._single_rank or self._pipeline.in_step is not None or self._reader.last_attempt < 0:
            return False
        earlier = self._capture_point.at_failed_update(self._pipeline) or EarlierState({})
        earlier = earlier if self._shadow is None else replace(earlier, buffers=self._shadow.pairs)
        self._save_began()
        self._emergency.before_stop(lambda kind: self._save(kind, earlier))
        return self._manager.saved_step == self._reader.step

    # -- saving

    def _do_due(self, earlier: EarlierState | None) -> None:
        """Do what is due, with part of the state as it was `earlier`."""
        if self._due == "take" and self._single_rank and not self._manager.idle:
            return  # once the save under way has ended
        action, self._due = self._due or "", None
        self._save_began()
        self._train_state.scaler = self._pipeline.scaler
        if action == "take":
            self._inexact = () if earlier is None else earlier.inexact
            self._manager.capture(self._pipeline.attempt, earlier)
        else:
            self._save_now(action, earlier)
        if self._replay_check.failure:
            reason, self._replay_check.failure = self._replay_check.failure, ""
            self._events.record("unproven", f"a resume will be verified by the state alone: {reason}")

    def _save_began(self) -> None:
        """A save begins on all ranks; that it has ended on all of them is known from the rows of later attempts."""
        self._no_save_running, self._save_attempt = self._single_rank, self._pipeline.attempt

    def _save_now(self, action: str, earlier: EarlierState | None) -> None:
        self._reader.drain(self._pipeline)
        kind, _, number = action.partition(":")
        self._save("emergency" if kind == "stop" else "regular", earlier)
        if kind == "stop":
            self._end_run(int(number))

    def _save(self, kind: str, earlier: EarlierState | None = None) -> None:
        """Save now and wait for it; every row must have been read."""
        self._train_state.scaler = self._pipeline.scaler
        self._manager.before_update()
        self._inexact = () if earlier is None else earlier.inexact
        self._manager.save(self._reader.step, self._pipeline.attempt, self._guard_state(), kind=kind, earlier=earlier)

    def _guard_state(self) -> dict[str, Any]:
        return {**self._reader.state_dict(), "inexact": list(self._inexact)}

    def _end_run(self, number: int) -> None:
        name, step = signal.Signals(number).name, self._reader.step
        result = "saved" if self._manager.saved_step == step else "NOT saved"
        self._events.record("stopped", f"{name} received: {result} at step {step}, and ended", {"signal": name})
        self._reader.journal.flush()
        self._preemption.end(number)

    def close(self, *, intact: bool) -> None:
        """Save what is not saved yet, if the run is `intact`: between two steps and without an error.

        A signal that comes meanwhile waits for this, see `end_if_signalled`.
        """
        try:
            self._close(intact=intact)
        except Exception as error:
            log.error("surefoot: the last checkpoint was not saved: %s", error, exc_info=error)

    def _close(self, *, intact: bool) -> None:
        self._consensus.close()
        try:
            if not intact:
                self._manager.close(wait=_FAILED_RUN_WAIT)
                return
            self._manager.poll(wait=True)
            if self._reader.step > self._manager.saved_step:
                self._save("regular", self._capture_point.at_close(self._pipeline))
            self._manager.close()
        finally:
            self._preemption.close()

    def end_if_signalled(self) -> None:
        """End the process if a signal came that was not acted on before the run was closed."""
        self._preemption.end_if_signalled()

    def _report_inexact(self, reason: str | None) -> None:
        """Report, once, why losses after a resume may differ from those of an uninterrupted run."""
        if reason and reason not in self._reported:
            self._reported.add(reason)
            self._events.record("inexact", reason)

"""A run's hold on the disk: resumed when it is attached, saved as it goes, at trouble, and when it is told to end."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from surefoot.checkpoint.buffers import BufferShadow
from surefoot.checkpoint.dataloader import position_of
from surefoot.checkpoint.manager import CheckpointManager, Resumed, SaveInterval
from surefoot.checkpoint.pending_save import EarlierState
from surefoot.checkpoint.rank_rendezvous import RankGroup
from surefoot.checkpoint.replay_check import ReplayCheck
from surefoot.checkpoint.train_state import TrainState
from surefoot.checkpoint.tree import Stateful
from surefoot.guard.batches import FetchesThrough
from surefoot.guard.capture_point import AHEAD, DRAWN, DRAWN_AHEAD, ELSEWHERE, EXACT_IF, HELD, CapturePoint
from surefoot.guard.checkpoint_events import CheckpointEventLog
from surefoot.guard.data_position import NAME, DataPosition
from surefoot.guard.emergency_save import EmergencySaver, known_of
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.preemption import Preemption
from surefoot.guard.rank_consensus import RankConsensus
from surefoot.guard.recovery import Recovery
from surefoot.guard.resume import Resumer
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.judge.policy import Policy

FOLDER = "checkpoints"
_SOON = 10.0
"""Seconds that a run which failed waits for a save that is under way: other processes may be gone."""
_GATES = "surefoot.gates"


class Checkpointer:
    """Checkpoints of one attached run."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        run_dir: Path,
        rounds: StepPipeline,
        desk: MetricsReader,
        footing: Recovery,
        policy: Policy,
        scheduler: Sequence[Stateful],
        extra: Mapping[str, Any],
        loader: Any,
        shadow: BufferShadow | None = None,
        step_fn: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        self._shadow = shadow
        self._rounds, self._desk = rounds, desk
        ranks = rounds.meter.ranks
        word = ranks.from_first(secrets.token_hex(8))
        alone = self._alone = ranks.world == 1
        self._where = DataPosition(loader, extra)
        self._loader = loader
        self._point = CapturePoint(self._where)
        data = {} if self._where.keeper is None else {NAME: self._where.keeper}
        self._whole = TrainState(model, optimizers, scheduler=scheduler, extra={**extra, _GATES: footing, **data})
        self._herald = CheckpointEventLog(desk, rounds)
        self._probe = ReplayCheck(model, step_fn, every=policy.probe_every)
        self._keeping = CheckpointManager(
            run_dir / FOLDER,
            self._whole,
            on_event=self._herald.tell,
            group=RankGroup(ranks.rank, ranks.world, word),
            interval=SaveInterval(policy.save_every, policy.save_seconds if alone else float("inf")),
            replay_check=self._probe,
        )
        self._resuming = Resumer(
            self._keeping, herald=self._herald, desk=desk, footing=footing, policy=policy, run_dir=run_dir
        )
        told = {"desk": desk, "footing": footing, "herald": self._herald}
        self._rescue = EmergencySaver(self._keeping, self._whole, gates=_GATES, **told)
        self._agreement = RankConsensus(ranks.rank, ranks.world, word)
        self._parting = Preemption(self._agreement)
        self._hourly = SaveInterval(1 << 62, policy.save_seconds) if not alone and ranks.rank == 0 else None
        self._due: str | None = None
        """What is to be done before the next forward pass: take, save, or stop:SIGNAL."""
        self._inexact: tuple[str, ...] = ()
        """Why the state that was taken last may not lead to the same losses again."""
        self._told: set[str] = set()
        """What was said of exactness in this process."""
        self._sees_forward_end = False
        """The ends of forward passes are seen; not so in a compiled model."""
        self.elsewhere = False
        """Batches are fetched in another thread than the one that trains."""
        self._prepared = False
        self._free = alone
        """No process is at a save, as all of them know."""
        self._since = -1
        """The attempt after which a save was last begun."""
        self.resumed: Resumed | None = None

    def resume(self) -> Resumed | None:
        """Go on from the newest checkpoint that is whole, if there is one."""
        self._whole.scaler = self._rounds.scaler
        if not isinstance(self._loader, FetchesThrough):
            self._herald.tell("exact_if", EXACT_IF)
        self._tell_inexact(self._where.position.warning_for(announced=True))
        self.resumed = self._resuming.resume()
        self._point.started(self._rounds, resumed=self.resumed is not None)
        return self.resumed

    def listen(self) -> None:
        """From here on signals end the run at a good moment."""
        self._parting.listen()

    # -- step by step

    def rewire(self, rounds: StepPipeline) -> None:
        """The optimizers hold other parameters now."""
        self._rounds = self._herald.rounds = rounds

    def before_step(self) -> None:
        self._keeping.before_update()
        self._rounds.tell_busy(not self._keeping.idle)

    def round_ended(self) -> None:
        """All optimizers have stepped, and what was decided is done."""
        attempt = self._rounds.attempt
        if not self._prepared:
            self._prepared = True
            self._keeping.preallocate()
            self._begun()
        self._keeping.poll()
        self._ask(attempt)
        self._due = self._agreement.due(attempt) or self._due
        # While something is amiss no state is worth much; but one that may be doubted is better than none for long.
        step = self._desk.step
        if self._rescue.round_ended(self._where.data, free=self._keeping.idle if self._alone else self._free):
            self._begun()
        worth = self._desk.judge.quiet or self._keeping.interval.overdue(step)
        if self._due is None and worth and self._keeping.due(step, free=self._free):
            self._due = "take"
        ahead = self._point.drawn_ahead(self._rounds)
        self._tell_inexact(DRAWN_AHEAD.format(", ".join(ahead)) if ahead else None)
        if self._point.round_ended(self._rounds, due=self._due is not None):
            self._tell_inexact(AHEAD)
        if self.elsewhere:
            self._tell_inexact(ELSEWHERE)
        if not self._point.announced:
            self._tell_inexact(self._where.position.warning_for(announced=False))

    def withdraw(self, attempt: int) -> None:
        """This attempt was not the end of an iteration: what was taken there is not written, and a signal waits."""
        self._due = None if self._due == "take" else self._due
        self._point.between = False
        self._keeping.withdraw_capture(attempt)

    def evaluates(self) -> None:
        """The model is used without gradients: between two updates a signal need not wait for the end of that."""
        if not self._point.between:
            return
        self._point.evaluates(self._rounds)
        if not self._parting.wanted or self._point.soon_exact:
            return
        number = self._parting.now(self._rounds.attempt)
        if number is not None:
            self._due = None
            self._begun()
            self._obey(f"stop:{number}", self._point.at_evaluation(self._rounds))

    def iterates(self, loader: Any) -> None:
        """The loop takes its batches from this; if `attach` was given no loader, the place in the data is not kept."""
        if loader is None or self._loader is not None or isinstance(loader, range):
            return
        position = position_of(loader)
        known = "surefoot.attach was given no loader, so the place in the data is not kept. Pass loader= to it as well."
        self._tell_inexact(known if position.stateful is not None else position.warning_for(announced=True))

    def before_fetch(self) -> None:
        """The loop asks for its next batch: the moment at which a resumed run begins."""
        if not torch.is_grad_enabled():  # of an evaluation
            return
        if self._alone and self._point.between and self._parting.wanted:
            self._parting.ask(self._rounds.attempt)
            self._due = self._agreement.due(self._rounds.attempt) or self._due
        self._point.before_fetch(self._rounds, due=self._due is not None)

    def fetched(self) -> None:
        """The loop has a batch. Had there been none, a save would wait for the first one of the next epoch."""
        if self._due is not None and self._point.exact and torch.is_grad_enabled():
            self._act(self._point.at_fetch())

    def _ask(self, attempt: int) -> None:
        self._parting.ask(attempt)
        if self._hourly is not None and self._hourly.due(0):
            self._hourly.reset(0)
            self._agreement.propose("save", attempt)

    def forward_began(self) -> None:
        """The loop has done what it does after a step, such as a scheduler's, and goes on: now it can be saved.

        It has fetched its next batch by then, which a resumed run will fetch again.
        """
        self._goes_on(seen=True)

    def forward_ended(self) -> None:
        """A forward pass in training is over."""
        self._sees_forward_end = True
        self._point.forward_ended(self._rounds)

    def _goes_on(self, *, seen: bool) -> None:
        between, due = self._point.between, self._due is not None
        if (due and between) or self._point.looking:
            drawn = self._point.drawn(self._rounds)
            self._tell_inexact(DRAWN.format(", ".join(drawn)) if drawn else None)
        if due and between:
            earlier = self._point.at_forward(self._rounds)
            if earlier is not None:
                if not seen and self._shadow is not None:
                    earlier = replace(earlier, buffers=self._shadow.pairs)
                self._tell_inexact(HELD if HELD in earlier.inexact else None)
                self._act(earlier)
        self._point.forward_began()

    def _act(self, earlier: EarlierState | None) -> None:
        """Do what is due, with some of the state as it was `earlier`."""
        if self._due == "take" and self._alone and not self._keeping.idle:
            return  # as soon as the save that is under way has ended
        what, self._due = self._due or "", None
        self._begun()
        self._whole.scaler = self._rounds.scaler
        if what == "take":
            self._inexact = () if earlier is None else earlier.inexact
            self._keeping.capture(self._rounds.attempt, earlier)
        else:
            self._obey(what, earlier)
        self._tell_of_probe()

    def _begun(self) -> None:
        """A save begins, in all processes; that it has ended in all of them is told with the rows of later attempts."""
        self._free, self._since = self._rounds.meter.ranks.world == 1, self._rounds.attempt

    def watched(self, batch: Any = None) -> None:
        """A loss is there: the moment, where the forward pass before it was not seen, as in a compiled model."""
        self._goes_on(seen=False)
        if not self._sees_forward_end:
            self._point.forward_ended(self._rounds)
        self._probe.observe(batch)

    def row_read(self) -> None:
        """A row was read and judged."""
        if self._desk.attempt > self._since:
            self._free = not self._desk.busy
        self._keeping.metrics_read(self._desk.step, self._desk.known, self._known)
        self._keeping.mark_healthy(self._desk.judge.proven)
        self._rescue.row_read()
        if self._desk.alive < self._rounds.meter.ranks.world:  # a spread model cannot be run by some of them alone
            self._probe.disabled_reason = "one of the processes has lost its protection"
        self._resuming.loosen()

    def went_back(self, attempt: int) -> None:
        """The run is again as it was after an attempt: what was saved since may hold the trouble."""
        self._keeping.mark_suspect(attempt, "the run went back behind it")

    def stopped(self) -> None:
        """The judge ends the run."""
        self._begun()
        self._rescue.stopped(self.save)

    def report(self, values: Mapping[str, float]) -> None:
        self._keeping.metrics |= values

    # -- now

    def save(self, kind: str, earlier: EarlierState | None = None) -> None:
        """Save now, with every number read."""
        self._whole.scaler = self._rounds.scaler
        self._keeping.before_update()
        self._inexact = () if earlier is None else earlier.inexact
        self._keeping.save(self._desk.step, self._rounds.attempt, self._known(), kind=kind, earlier=earlier)

    def _known(self) -> dict[str, Any]:
        return {**known_of(self._desk), "inexact": list(self._inexact)}

    def _obey(self, what: str, earlier: EarlierState | None) -> None:
        for block, tag in self._rounds.arrived(rest=True):
            self._desk.read(block, tag)
        kind, _, number = what.partition(":")
        self.save("emergency" if kind == "stop" else "regular", earlier)
        if kind == "stop":
            self._stop(int(number))

    def _stop(self, number: int) -> None:
        name = signal.Signals(number).name
        done = "saved" if self._keeping.saved_step == self._desk.step else "NOT saved"
        self._herald.tell("stopped", f"{name} came: {done} at step {self._desk.step}, and ended", {"signal": name})
        self._desk.journal.flush()
        self._parting.end(number)

    def close(self, *, whole: bool) -> None:
        """The run ends: what is not saved yet is, if the run is `whole`, between two steps and unharmed.

        A signal that comes meanwhile waits for that, see `end_if_asked`.
        """
        self._agreement.close()
        try:
            if not whole:
                self._keeping.close(wait=_SOON)
                return
            self._keeping.poll(wait=True)
            if self._desk.step > self._keeping.saved_step:
                self.save("regular", self._point.at_close(self._rounds))
            self._keeping.close()
        finally:
            self._parting.close()

    def end_if_asked(self) -> None:
        """A signal came that was not answered before the run was closed: end the process by it."""
        self._parting.end_if_asked()

    # -- what is told

    def _tell_inexact(self, words: str | None) -> None:
        """Say, once, why losses after a resume may not be those of an uninterrupted run."""
        if words and words not in self._told:
            self._told.add(words)
            self._herald.tell("inexact", words)

    def _tell_of_probe(self) -> None:
        why = self._probe.take_failure()
        if why:
            self._herald.tell("unproven", f"a resume will be proven by the state alone: {why}")

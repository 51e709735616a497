"""What keeps a run on its feet: states to go back to, what steps are asked for, and decisions carried out.

A decision is carried out at the end of the round it was made in, when all optimizers have stepped and no gradient is
half gathered. A state is taken at that same point, so that what the loop does from there on it does again.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from surefoot.actions.action_context import CannotAct
from surefoot.actions.apply import apply
from surefoot.actions.step_overrides import OverrideApplier
from surefoot.actions.stop import TrainingStopped
from surefoot.checkpoint.buffers import BufferShadow
from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing
from surefoot.checkpoint.train_state import TrainState
from surefoot.checkpoint.tree import Stateful
from surefoot.gate.rule import VerdictSlot
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.judge.policy import Policy
from surefoot.records import EVENT_MARK, Action, Decision

log = logging.getLogger("surefoot")
GATES = "what the gates of surefoot remember"


class Recovery:
    """The run as actions see it; `act.run.Run` says what they may reach."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        rounds: StepPipeline,
        desk: MetricsReader,
        policy: Policy,
        shadow: BufferShadow | None,
        scheduler: Sequence[Stateful],
        extra: Mapping[str, Any],
        ring: int | None,
    ) -> None:
        self.rounds = rounds
        self.reins = OverrideApplier(model, optimizers, rounds.gates)
        self._desk = desk
        self._policy = policy
        self._shadow = shadow
        self._whole = TrainState(
            model, optimizers, scheduler=scheduler, extra={**extra, GATES: self}, groups=bool(scheduler)
        )
        self._whole.step_changes = {id(gate.optimizer): gate.options for gate in rounds.gates}
        keeps = ring != 0 and not policy.observe
        options: dict[str, Any] = {"size": policy.max_snapshots, "max_age": policy.snapshot_reach, "budget_bytes": ring}
        self.ring = SnapshotRing(self._whole, **options) if keeps else None
        self._prefilled = [(o, bool(o.state)) for o in self._whole.optimizers]
        """The optimizers, each with whether it had state before its first step, as Adagrad does."""
        self._taken: int | None = None
        """The attempt after which a state was last taken, or tried to be."""
        self._grown = False
        """A first step was taken, after which the optimizers hold all they ever will."""
        self._told = ""
        """What was last said of the ring: where states live, or that it is off."""
        self._decided: list[Decision] = []
        self.on_return: Callable[[int], None] | None = None
        """Told of the attempt to which the run went back."""
        self.on_stop: Callable[[], None] | None = None
        """Told before the run is stopped."""

    @property
    def pending(self) -> bool:
        """Something was decided and is still to be done."""
        return bool(self._decided)

    # -- step by step

    def begin(self) -> None:
        """A forward pass is about to run; before the first in training, so that a run can go back to its very start."""
        if self._taken is None and torch.is_grad_enabled():  # after an evaluation a loop may still load its weights
            state = self._take(self.rounds.attempt - 1, wait=True)
            if state is not None:
                state.good = True  # there is nothing better

    def before_step(self, k: int) -> None:
        if self.ring is not None:
            self.ring.before_update()
        self.reins.before(k)

    def after_step(self, k: int) -> None:
        self.reins.after(k)

    def row_read(self, decided: Sequence[Decision]) -> None:
        """A row was read and judged."""
        if self.ring is not None:
            for state in self.ring.snapshots:
                if state.attempt == self._desk.attempt:
                    state.step = self._desk.step  # only now it is known which updates have landed
            self.ring.mark_good(self._desk.judge.proven)
        self._decided += decided
        if any(d.action is Action.STOP for d in decided):
            self._desk.journal.flush()
            self._carry_out_all()

    def step_ended(self) -> None:
        """An optimizer has stepped, and others have still to before the iteration of the loop is over.

        What is asked of the steps can be set now. Going back has to wait: the graph of the generator's loss may hang on
        the weights as they are, and a loop that goes on in the middle of an iteration would not do it again as a whole.
        """
        if not any(d.action is Action.REWIND for d in self._decided):
            self._carry_out_all()

    def withdraw(self, attempt: int) -> None:
        """A state taken after this attempt is from the middle of an iteration."""
        if self.ring is not None:
            self.ring.drop_unproven_after(attempt - 1)
        if self._taken == attempt:
            self._taken = attempt - self._policy.snapshot_every

    def round_ended(self) -> None:
        """All optimizers have stepped."""
        self._carry_out_all()
        if self.ring is not None and not self._grown:
            self._grown = True
            self.ring.preallocate()
            self._tell_of(self.ring)
        since = self.rounds.attempt - self._policy.snapshot_every
        if self._desk.judge.quiet and (self._taken is None or self._taken <= since):
            self._take(self.rounds.attempt, wait=False)

    def rewire(self, rounds: StepPipeline) -> None:
        """The optimizers hold other parameters now."""
        for old, gate in zip(self.rounds.gates, rounds.gates, strict=True):
            gate.options = old.options
        self.rounds = rounds
        self.reins.rewire(rounds.gates)

    def release(self) -> None:
        """Let go of the run and leave it as the loop has set it."""
        self._tell_messages()
        self.reins.release()
        self.ring = None

    # -- states

    def _take(self, attempt: int, *, wait: bool) -> Snapshot | None:
        """Processes take their states at the same attempts: one whose memory is not there yet leaves this one out."""
        self._taken = attempt
        if self.ring is None or self.ring.disabled_reason is not None:
            return None
        self._whole.scaler = self.rounds.scaler
        state = self.ring.take(attempt, self._desk.step, wait=wait)
        self._tell_of(self.ring)
        return state

    def _tell_messages(self) -> None:
        if self.ring is not None and self.ring.messages:
            self._tell_of(self.ring)

    def _tell_of(self, ring: SnapshotRing) -> None:
        messages, ring.messages = ring.messages, []
        for message in messages:
            self._desk.note("ring", message, attempt=self.rounds.attempt)
            if self._desk.journal.rank == 0:
                log.info("surefoot: %s", message)
        place = ring.location if ring.disabled_reason is None else "nowhere"
        if place != self._told:
            self._told = place
            self._desk.note("ring", ring.describe(), attempt=self.rounds.attempt)
            if ring.disabled_reason is not None:
                log.warning("surefoot: the run cannot go back if it has to: %s", ring.describe())

    def state_dict(self) -> dict[str, Any]:
        """What the gates remember, which goes back with the run."""
        return {str(k): gate.memory.state_dict() for k, gate in enumerate(self.rounds.gates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for k, gate in enumerate(self.rounds.gates):
            gate.memory.load_state_dict(state[str(k)])

    # -- decisions

    def _carry_out_all(self) -> None:
        decided, self._decided = self._decided, []
        self._tell_messages()
        for decision in decided:
            try:
                done = apply(decision, self)
            except TrainingStopped:
                if self.on_stop is not None:
                    self.on_stop()
                raise
            except CannotAct as why:
                self._desk.judge.failed(decision, str(why))
                self._desk.note("failed", f"{decision.action}: {why}", attempt=self.rounds.attempt)
                self._say(logging.WARNING, decision, f"{decision.remedy or decision.action} cannot be done: {why}")
            else:
                self._say(logging.INFO if decision.action is Action.RELAX else logging.WARNING, decision, done)

    def _say(self, level: int, decision: Decision, done: str) -> None:
        if self._desk.journal.rank == 0 and decision.action is not Action.REFUSE:
            told = decision.step, decision.reason, done or decision.action
            log.log(level, "surefoot: step %d: %s; %s", *told, extra={EVENT_MARK: True})

    # -- what actions reach

    @property
    def scaler(self) -> Any:
        return self.rounds.scaler

    def shared(self, attempts: Sequence[int]) -> Sequence[int]:
        ranks, newest = self.rounds.meter.ranks, self.rounds.meter.block.verdict[VerdictSlot.ALIVE]
        # Rows are read two steps late, and one may have gone since. To ask the device is a wait, but a seldom one.
        if ranks.world > 1 and min(self._desk.alive, float(newest)) < ranks.world:  # it would not answer
            raise CannotAct("one of the processes has lost its protection, so they cannot go back together")
        return ranks.shared(attempts, self._policy.max_snapshots)

    def went_back(self, state: Snapshot) -> None:
        at = self.rounds.attempt
        for block, tag in self.rounds.arrived(rest=True):
            self._desk.read(block, tag, judged=False)  # of a time that is gone: written down, and no more
        if self._shadow is not None:
            self._shadow.reset()
        self.rounds.start_over()
        self._taken = self.rounds.attempt
        self._desk.went_back(state.attempt, state.step)
        if self.on_return is not None:
            self.on_return(state.attempt)
        self._desk.note(
            "rewound",
            f"back to step {state.step}, as after attempt {state.attempt}",
            values={"step": state.step, "attempt": state.attempt},
            attempt=at,
        )
        self._tell_messages()

    def empty(self) -> None:
        for optimizer, prefilled in self._prefilled:
            try:
                initial = _initial_state(optimizer) if prefilled else {}
            except Exception as error:  # of a constructor that wants more than parameters
                name = type(optimizer).__name__
                log.warning("surefoot: the state of %s is kept, as it cannot be made anew: %s", name, error)
                continue
            optimizer.state.clear()
            optimizer.state.update(initial)
        for gate in self.rounds.gates:
            gate.forget()


def _initial_state(optimizer: Optimizer) -> dict[Any, Any]:
    """The state that an optimizer of this class and these parameter groups begins with."""
    make: Any = type(optimizer)
    known = inspect.signature(make.__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return dict(make([dict(group) for group in optimizer.param_groups], **options).state)

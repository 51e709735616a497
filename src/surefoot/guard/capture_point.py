"""The point of a loop at which its state is captured: right before it fetches its next batch.

A resumed process begins by fetching a batch, after everything that follows an update (scheduler, averaged weights).
Where fetches are announced, by `guard.batches` or by a loader of `surefoot.data`, all that moves with them is read
right before one. Elsewhere it is read after the optimizer's step, and it is noticed if random numbers are drawn between
that and the next forward pass.
"""

from __future__ import annotations

import time
from dataclasses import replace

from surefoot.checkpoint.pending_save import EarlierState
from surefoot.checkpoint.rng import (
    RngStates,
    changed_generators,
    changed_host_generators,
    replace_torch_states,
    set_rng_states,
    torch_rng_changed,
)
from surefoot.guard.data_position import NAME, DataPosition
from surefoot.guard.step_pipeline import StepPipeline

WAIT = 32
"""Updates without a fetch between them for which a save waits for one, as a loop may use a batch several times."""
PATIENCE = 5.0
"""Seconds that a run which is told to end waits for the end of an evaluation, after which it can be saved exactly."""
_LOOKED = 3
"""Updates at the start of a run after which it is looked at whether random numbers are drawn outside the model."""
_OUT = (
    "Write `for batch in guard.batches(loader):` (without a loader: `for step in guard.batches():`) to make this exact."
)
EXACT_IF = (
    "a resume repeats an uninterrupted run bit for bit if batches are fetched by `for batch in guard.batches(loader):` "
    "(without a loader: `for step in guard.batches():`). In any other loop it does so only if no batch is fetched or "
    "drawn before optimizer.step() for the step after it, and no random numbers are drawn between optimizer.step() and "
    "the next fetch; a warning follows if they are."
)
DRAWN = (
    "random numbers ({}) are drawn between optimizer.step() and the next forward pass. Those drawn before the next "
    "batch is fetched will be missing after a resume, and losses will then differ from those of an uninterrupted run. "
    f"{_OUT}"
)
AHEAD = (
    "the loop fetches its next batch before optimizer.step(). A resume repeats an uninterrupted run only if it fetches "
    "exactly one batch ahead and draws no random numbers between that fetch and the next forward pass."
)
DRAWN_AHEAD = (
    "random numbers ({}) are drawn between the forward pass and optimizer.step(). If the loop draws its next batch "
    f"there, that batch will be left out after a resume, and losses will differ. {_OUT}"
)
ELSEWHERE = (
    "batches are fetched in another thread than the one that trains. Those that wait there when the run is saved will "
    "be left out after a resume. Fetch them with `for batch in guard.batches(loader):` in the loop itself."
)
HELD = (
    f"no batch was fetched for {WAIT} updates, so the run was saved between two updates on the same batch: a resume "
    "goes on with the next batch."
)
EVALUATING = (
    "the run was saved in the middle of an evaluation. If that draws random numbers and is not done again after the "
    "resume, losses will differ from an uninterrupted run."
)
HOST = (
    "the run was saved after its next batch was fetched, and random numbers of {} may have been drawn for that batch: "
    "a resume would go on after those."
)
LATE = "the place in the data was only asked for after the next batch may have been fetched, which would be left out."
CLOSED = (
    "random numbers were drawn between the last update and the end of the run; a run that is resumed to train on "
    "repeats an uninterrupted one only if the loop draws them after each update."
)


class CapturePoint:
    """Follows the fetches, forward passes and updates of one loop."""

    def __init__(self, where: DataPosition) -> None:
        self._where = where
        self.announced = False
        """Fetches are announced."""
        self.ahead = False
        """Batches are fetched before the update that precedes them."""
        self.between = False
        """The last round has ended, and no forward pass in training has begun since."""
        self._waiting = True
        """No forward pass in training has begun since the last round or the start."""
        self._marked = self._fetched = False
        """Since the last round a batch was fetched: before any forward pass; at all."""
        self._earlier: EarlierState | None = None
        self._next: EarlierState | None = None
        """As it was before a batch was fetched ahead."""
        self._torch: RngStates = []
        """Of the end of the last round, or of the fetch that came after it."""
        self._known: RngStates | None = None
        """The last complete reading of random states."""
        self._evaluated: RngStates | None = None
        """Random states as the first evaluation after the last round found them."""
        self._evaluating = 0.0
        """Since when that goes on."""
        self._after_forward: RngStates | None = None
        """Random states as the last forward pass of a round left them, in the first rounds."""
        self._restore: tuple[RngStates, dict[str, object]] | None = None
        self._rounds_seen = 0
        self._waited = 0
        self.held = False
        """A save has waited for a fetch in vain."""

    # -- a resumed process

    def started(self, rounds: StepPipeline, *, resumed: bool) -> None:
        """The loop is about to begin; when it was `resumed`, random numbers are put back before its first fetch."""
        self._known = self._where.random(rounds)
        if resumed:
            self._restore = self._known, self._where.generators()
            self._earlier = EarlierState({}, self._known)

    # -- fetches

    def before_fetch(self, rounds: StepPipeline, *, due: bool) -> None:
        """The loop asks for a batch."""
        self.announced = self._fetched = True
        if self._restore is not None:
            set_rng_states(self._restore[0])
            self._where.restore(self._restore[1])
            self._restore = None
        if self._waiting and not self._marked:
            self._marked = True
            self._earlier = self._read(rounds, due=due, fetching=True)
        elif self.ahead and not self._waiting:
            self._next = self._read(rounds, due=True, fetching=True)

    @property
    def exact(self) -> bool:
        """Now is right after the first batch since the last round was fetched, and before anything was done with it."""
        return self.between and self._marked

    # -- rounds

    def round_ended(self, rounds: StepPipeline, *, due: bool) -> bool:
        """All optimizers have stepped; whether it was noticed now that batches are fetched ahead."""
        new = self._fetched and not self._marked and not self.ahead
        self.ahead |= new
        self.between = self._waiting = True
        self._marked = self._fetched = False
        self._evaluated = None
        self._rounds_seen += 1
        self._earlier, self._next = self._next, None
        if self.announced:
            self._torch = self._where.torch(rounds)
        else:
            self._earlier = self._read(rounds, due=due or self._rounds_seen <= _LOOKED)
        return new

    def forward_began(self) -> None:
        """A forward pass in training."""
        self.between = self._waiting = False
        self._restore = None

    def forward_ended(self, rounds: StepPipeline) -> None:
        """A forward pass in training is over, or a loss is there whose forward pass was not seen."""
        if not self.announced and self._rounds_seen < _LOOKED:
            self._after_forward = self._where.random(rounds)

    def drawn_ahead(self, rounds: StepPipeline) -> list[str]:
        """The generators that were drawn from between the last forward pass and the end of its round, just now."""
        before, self._after_forward = self._after_forward, None
        return [] if before is None or self.announced else changed_generators(before, self._where.random(rounds))

    @property
    def looking(self) -> bool:
        """Whether it is to be looked at now what was drawn since the last round, though nothing is saved."""
        return self._waiting and not self.announced and self._rounds_seen <= _LOOKED

    def drawn(self, rounds: StepPipeline) -> list[str]:
        """The generators that were drawn from since the last round; where fetches are announced it does not matter."""
        if self.announced or self._earlier is None or self._earlier.rng_states is None:
            return []
        return changed_generators(self._earlier.rng_states, self._where.random(rounds))

    # -- what a save is made with

    def at_fetch(self) -> EarlierState | None:
        self._waited = 0
        return self._earlier

    def at_forward(self, rounds: StepPipeline) -> EarlierState | None:
        """None where a fetch is still to be waited for."""
        earlier = self._earlier
        if not self.announced:
            drawn = self.drawn(rounds)
            words = (DRAWN.format(", ".join(drawn)),) if drawn else ()
            return earlier if earlier is None else replace(earlier, inexact=words)
        if self.ahead and earlier is not None:
            return replace(earlier, inexact=(AHEAD,))
        self._waited += 1
        if self._waited <= WAIT:
            return None
        self._waited, self.held = 0, True
        return replace(self._read(rounds, due=True, fetching=True), inexact=(HELD,))

    def evaluates(self, rounds: StepPipeline) -> None:
        """The model is used without gradients between two rounds."""
        if self._evaluated is None:
            self._evaluated, self._evaluating = self._where.random(rounds), time.monotonic()

    @property
    def soon_exact(self) -> bool:
        """In an evaluation that will not be done again after a resume, and has only begun: its end is worth a wait."""
        return self.announced and not self._marked and time.monotonic() - self._evaluating < PATIENCE

    def at_evaluation(self, rounds: StepPipeline) -> EarlierState:
        """In the middle of an evaluation, which may take longer than there is time."""
        assert self._evaluated is not None
        if self._marked and self._earlier is not None:  # it will be done again, after the same fetch
            return self._with_host(self._earlier, self._evaluated)
        if self.announced:
            now = self._read(rounds, due=True, fetching=True)
            return replace(now, rng_states=self._evaluated, inexact=(EVALUATING,))
        earlier = self._earlier or self._read(rounds, due=True)
        chance = earlier.rng_states or replace_torch_states(self._evaluated, self._torch)
        return replace(earlier, rng_states=chance, inexact=(EVALUATING, *self._late(earlier)))

    def at_close(self, rounds: StepPipeline) -> EarlierState | None:
        """At the end of the run, which may be resumed to train on; None: as everything is now."""
        if not self.between:
            return None
        now = self._where.random(rounds)
        if self._marked and self._earlier is not None:
            return self._with_host(self._earlier, now)
        if self.announced or self._earlier is None:
            drew = torch_rng_changed(self._torch, self._where.torch(rounds))
            return EarlierState({}, inexact=(CLOSED,)) if drew else None
        chance = self._earlier.rng_states or replace_torch_states(now, self._torch)
        return replace(self._earlier, rng_states=chance, inexact=self._late(self._earlier))

    def _late(self, earlier: EarlierState) -> tuple[str, ...]:
        """The place in the data takes long to ask for, and was not asked for in time."""
        return (LATE,) if self._where.keeper is not None and NAME not in earlier.extra else ()

    def _with_host(self, earlier: EarlierState, now: RngStates) -> EarlierState:
        """Complete a reading of torch's states alone: those of `random` and NumPy are those of now."""
        late = self._late(earlier)
        if earlier.rng_states is not None:
            return replace(earlier, inexact=late)
        drawn = [] if self._known is None else changed_host_generators(self._known, now)
        words = (HOST.format(" and ".join(drawn)),) if drawn else ()
        return replace(earlier, rng_states=replace_torch_states(now, self._torch), inexact=(*words, *late))

    def _read(self, rounds: StepPipeline, *, due: bool, fetching: bool = False) -> EarlierState:
        """Where data and random numbers stand; only what is read quickly unless a save is `due`."""
        states = self._where.generators()
        if due or self._where.quick:
            states |= self._where.data()
        self._torch = self._where.torch(rounds)
        if not due:
            return EarlierState(states)
        states |= self._where.extras(fetching=fetching)
        self._known = self._where.random(rounds)
        return EarlierState(states, self._known)

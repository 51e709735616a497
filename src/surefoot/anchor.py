"""A run's hold on the disk: resumed when it is attached, saved as it goes, at trouble, and when it is told to end."""

from __future__ import annotations

import copy
import logging
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from surefoot.agreement import Agreement
from surefoot.desk import Desk
from surefoot.footing import Footing
from surefoot.hearing import Hearing
from surefoot.journal.reader import read
from surefoot.judge.policy import Policy
from surefoot.records import TOLD, Checkpoint, Restraint
from surefoot.rounds import Rounds
from surefoot.state.buffers import BufferShadow
from surefoot.state.capture import Whole
from surefoot.state.chance import random_states
from surefoot.state.keeping import Keeping, Pace, Resumed
from surefoot.state.loader import position_of
from surefoot.state.rendezvous import Team
from surefoot.state.saving import Earlier
from surefoot.state.tree import Stateful

log = logging.getLogger("surefoot")
FOLDER = "checkpoints"
_SOON = 10.0
"""Seconds that a run which failed waits for a save that is under way: other processes may be gone."""
_GATES, _LOADER = "surefoot.gates", "surefoot.loader"


class Anchor:
    """Checkpoints of one attached run."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        run_dir: Path,
        rounds: Rounds,
        desk: Desk,
        footing: Footing,
        policy: Policy,
        scheduler: Sequence[Stateful],
        extra: Mapping[str, Any],
        loader: Any,
        shadow: BufferShadow | None = None,
    ) -> None:
        self._shadow = shadow
        self._rounds, self._desk, self._footing = rounds, desk, footing
        ranks = rounds.meter.ranks
        word = ranks.from_first(secrets.token_hex(8))
        alone = ranks.world == 1
        self._data = _position(loader)
        data = {} if self._data is None else {_LOADER: self._data}
        self._whole = Whole(model, optimizers, scheduler=scheduler, extra={**extra, _GATES: footing, **data})
        self._keeping = Keeping(
            run_dir / FOLDER,
            self._whole,
            tell=self._tell,
            team=Team(ranks.rank, ranks.world, word),
            pace=Pace(policy.save_every, policy.save_seconds if alone else float("inf")),
        )
        self._agreement = Agreement(ranks.rank, ranks.world, word)
        self._hourly = Pace(1 << 62, policy.save_seconds) if not alone and ranks.rank == 0 else None
        self._policy, self._run_dir = policy, run_dir
        self._careful: Restraint | None = None
        self._free_at = 0
        self._due: str | None = None
        """What is to be done before the next forward pass: take, save, or stop:SIGNAL."""
        self._earlier: Earlier | None = None
        self._unseen = False
        """Forward passes go unseen, and have drawn random numbers and changed buffers when a loss is there."""
        self._prepared = False
        self._free = alone
        """No process is at a save, as all of them know."""
        self._since = -1
        """The attempt after which a save was last begun."""
        self._asked: int | None = None
        """A signal that came."""
        self._hearing: Hearing | None = None
        self.resumed: Resumed | None = None

    # -- the beginning

    def resume(self) -> Resumed | None:
        """Go on from the newest checkpoint that is whole: the first process chooses, all load it."""
        ranks = self._rounds.meter.ranks
        name, wrong = None, None
        if ranks.rank == 0:
            self._keeping.clean()
            try:
                kept = self._keeping.newest()
                name = None if kept is None else kept.name
            except ValueError as error:
                wrong = error
        said = ranks.from_first((name, None if wrong is None else str(wrong)))
        if said[1] is not None:
            raise wrong or ValueError(said[1])
        if said[0] is None:
            return None
        kept = self._keeping.store.get(said[0])
        if kept is None:
            raise ValueError(f"this process does not see {said[0]} in {self._keeping.store.root}: is it the same disk?")
        self._whole.scaler = self._rounds.scaler
        began = time.monotonic()
        self.resumed = self._keeping.resume(kept)
        self._take_up(self.resumed, time.monotonic() - began)
        if self._policy.careful and ranks.from_first(_crashed(self._run_dir)):
            self._go_carefully()
        return self.resumed

    def _take_up(self, resumed: Resumed, seconds: float) -> None:
        """What the guard itself knew then, it knows again."""
        self._desk.step = resumed.step
        told = resumed.guard or {}
        notes = list(resumed.notes)
        try:
            self._desk.judge.load_state_dict(told["judge"])
            self._desk.history.load_state_dict(told["history"])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            notes.append(f"the judge begins anew, since what it knew was of another version: {error!r}")
        if resumed.equal is False:
            notes.append("the state that was loaded does not hash to the one that was saved")
        proof = {None: "saved by another number of processes", True: "equal to the bit", False: "not equal"}
        values = {"step": resumed.step, "seconds": round(seconds, 3), "proof": proof[resumed.equal], "notes": notes}
        self._tell("resumed", f"resumed from {resumed.checkpoint} at step {resumed.step}", values)
        for note in notes:
            log.warning("surefoot: resumed, but %s", note)

    def _go_carefully(self) -> None:
        """The run before this one crashed, and nobody knows why: smaller steps until it is clear that it goes well."""
        count = len(self._rounds.gates)
        self._careful = Restraint(rate=0.5, clip=(0.5,) * count)
        self._free_at = self._desk.step + self._policy.loosen_after
        self._footing.reins.set(self._careful)
        self._tell("careful", "resumed after a crash with half the rate, and gradients clipped at 0.5", {})

    def _loosen(self) -> None:
        if self._careful is None or self._desk.step < self._free_at:
            return
        if self._footing.reins.restraint == self._careful:  # else the judge has asked for something of its own
            self._footing.reins.set(Restraint())
            self._tell("loosened", f"{self._policy.loosen_after} updates went well: the rate is the loop's again", {})
        self._careful = None

    # -- step by step

    def rewire(self, rounds: Rounds) -> None:
        """The optimizers hold other parameters now."""
        self._rounds = rounds

    def before_step(self) -> None:
        self._keeping.settle()
        self._rounds.tell_busy(not self._keeping.idle)

    def round_ended(self) -> None:
        """All optimizers have stepped, and what was decided is done."""
        attempt = self._rounds.attempt
        if not self._prepared:
            self._prepared = True
            self._keeping.prepare()
            self._begun()
        self._keeping.heard()
        self._ask(attempt)
        self._due = self._agreement.due(attempt)
        # While something is amiss no state is worth much; but one that may be doubted is better than none for long.
        step = self._desk.step
        worth = self._desk.judge.quiet or self._keeping.pace.overdue(step)
        if self._due is None and worth and self._keeping.due(step, free=self._free):
            self._due = "take"
        if self._due is not None:
            self._earlier = self._before_the_next_batch()

    def forward_began(self) -> None:
        """The loop has done what it does after a step, such as a scheduler's, and goes on: now it can be saved.

        It has fetched its next batch by then, which a resumed run will fetch again.
        """
        if self._due is None:
            return
        what, self._due = self._due, None
        self._begun()
        self._whole.scaler = self._rounds.scaler
        if what == "take":
            self._keeping.take(self._rounds.attempt, self._earlier)
        else:
            self._obey(what)

    def _begun(self) -> None:
        """A save begins, in all processes; that it has ended in all of them is told with the rows of later attempts."""
        self._free, self._since = self._rounds.meter.ranks.world == 1, self._rounds.attempt

    def watched(self) -> None:
        """A loss is there: the moment, where the forward pass before it was not seen, as in a compiled model."""
        if self._due is None:
            return
        if not self._unseen and self._due == "take":
            self._unseen, self._due = True, None  # what it drew and changed was not kept: the next time it will be
            self._keeping.missed()
            return
        self._unseen = True
        if self._earlier is not None and self._shadow is not None:
            self._earlier = replace(self._earlier, buffers=self._shadow.pairs)
        self.forward_began()

    def _before_the_next_batch(self) -> Earlier:
        """A loop that draws its batches itself draws them again; a loader draws nothing that is not its own."""
        data = {} if self._data is None else {_LOADER: copy.deepcopy(self._data.state_dict())}
        if self._data is not None and not self._unseen:
            return Earlier(data)
        devices = {p.device for p in self._rounds.layout.params if p.is_cuda} if self._unseen else set()
        return Earlier(data, random_states(devices))

    def row_read(self) -> None:
        """A row was read and judged."""
        if self._desk.attempt > self._since:
            self._free = not self._desk.busy
        self._keeping.row_read(self._desk.step, self._desk.attempt, self._known)
        self._keeping.prove(self._desk.judge.proven)
        self._loosen()

    def went_back(self, attempt: int) -> None:
        """The run is again as it was after an attempt: what was saved since may hold the trouble."""
        self._keeping.doubt(attempt, "the run went back behind it")

    def report(self, values: Mapping[str, float]) -> None:
        self._keeping.metrics |= values

    def save(self, kind: str, earlier: Earlier | None = None) -> None:
        """Save now, with every number read."""
        self._whole.scaler = self._rounds.scaler
        self._keeping.settle()
        self._keeping.save(self._desk.step, self._rounds.attempt, self._known(), kind=kind, earlier=earlier)

    def close(self, *, whole: bool) -> None:
        """The run ends: what is not saved yet is, if the run is `whole`, between two steps and unharmed."""
        if self._hearing is not None:
            self._hearing.close()
        self._agreement.close()
        if not whole:
            self._keeping.close(wait=_SOON)
            return
        self._keeping.heard(wait=True)
        if self._desk.step > self._keeping.saved_step:
            self.save("regular")
        self._keeping.close()

    # -- signals

    def listen(self) -> None:
        """From here on signals end the run at a good moment."""
        self._hearing = Hearing(self._signalled)

    def _signalled(self, number: int) -> None:
        if self._asked is not None and number == signal.SIGINT:  # a person who asks twice does not want to wait
            raise KeyboardInterrupt
        self._asked = number

    def _ask(self, attempt: int) -> None:
        if self._asked is not None:
            self._agreement.propose(f"stop:{int(self._asked)}", attempt)
        if self._hourly is not None and self._hourly.due(0):
            self._hourly.done(0)
            self._agreement.propose("save", attempt)

    def _obey(self, what: str) -> None:
        for block, tag in self._rounds.arrived(rest=True):
            self._desk.read(block, tag)
        kind, _, number = what.partition(":")
        self.save("emergency" if kind == "stop" else "regular", self._earlier)
        if kind == "stop":
            self._stop(int(number))

    def _stop(self, number: int) -> None:
        """End as the signal would have it; where the program listens to it too, that is for the program to do."""
        name = signal.Signals(number).name
        saved = self._keeping.saved_step == self._desk.step
        done = "saved" if saved else "NOT saved"
        self._tell("stopped", f"{name} came: {done} at step {self._desk.step}, and ended", {"signal": name})
        self._desk.journal.flush()
        handler, self._asked = None if self._hearing is None else self._hearing.before(number), None
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, None)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)

    # -- what is told

    def _known(self) -> dict[str, Any]:
        return {"judge": self._desk.judge.state_dict(), "history": self._desk.history.state_dict()}

    def _tell(self, name: str, words: str, values: Mapping[str, Any]) -> None:
        rank = self._desk.journal.rank
        event = Checkpoint(
            step=self._desk.step, attempt=self._rounds.attempt, rank=rank, name=name, detail=words, values=dict(values)
        )
        self._desk.journal.event(event)
        if rank == 0 or name not in ("saved", "resumed"):
            level = logging.INFO if name in ("saved", "resumed") else logging.WARNING
            log.log(level, "surefoot: %s", words, extra={TOLD: True})


def _crashed(run_dir: Path) -> bool:
    """Whether the run before this one ended without a word: neither closed nor told to stop."""
    said = [event.get("name") for event in read(run_dir).events if event["kind"] in ("note", "checkpoint")]
    starts = [at for at, name in enumerate(said) if name == "attached"]
    if len(starts) < 2:
        return False
    return not {"closed", "stopped"} & set(said[starts[-2] : starts[-1]])


def _position(loader: Any) -> Stateful | None:
    """What can be saved of where the data stands."""
    if loader is None:
        return None
    position = position_of(loader)
    if position.warning:
        log.warning("surefoot: %s", position.warning)
    return position.keeper

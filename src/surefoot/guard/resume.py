"""The way back into a run: the newest whole checkpoint is loaded, what was loaded is proven, and after a crash the
run goes on with care."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from surefoot.checkpoint.manager import CheckpointManager, Resumed
from surefoot.guard.checkpoint_events import CheckpointEventLog
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.recovery import Recovery
from surefoot.journal.reader import read
from surefoot.judge.policy import Policy
from surefoot.records import StepOverrides

log = logging.getLogger("surefoot")
_STATE = {
    None: "was saved by another number of processes and cannot be compared",
    True: "is the saved one, to the bit",
    False: "does not hash to the one that was saved",
}


class Resumer:
    """Puts one run back, and lets go of it when all goes well."""

    def __init__(
        self,
        keeping: CheckpointManager,
        *,
        herald: CheckpointEventLog,
        desk: MetricsReader,
        footing: Recovery,
        policy: Policy,
        run_dir: Path,
    ) -> None:
        self._keeping, self._herald, self._desk, self._footing = keeping, herald, desk, footing
        self._policy, self._run_dir = policy, run_dir
        self._careful: StepOverrides | None = None
        self._free_at = 0

    def resume(self) -> Resumed | None:
        """Go on from the newest checkpoint that is whole: the first process chooses, all load it."""
        ranks = self._herald.rounds.meter.ranks
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
        began = time.monotonic()
        resumed = self._keeping.resume(kept)
        self._take_up(resumed, time.monotonic() - began)
        if self._policy.cautious_after_crash and ranks.from_first(_crashed(self._run_dir)):
            self._go_carefully()
        return resumed

    def _take_up(self, resumed: Resumed, seconds: float) -> None:
        """What the guard itself knew then, it knows again."""
        self._desk.step = resumed.step
        told = resumed.guard or {}
        notes = [*resumed.notes, *map(str, told.get("inexact", ()))]
        try:
            self._desk.judge.load_state_dict(told["judge"])
            self._desk.history.load_state_dict(told["history"])
            if "rewound" in told:  # it was saved in trouble, as the run was before that
                self._desk.judge.rewound(*told["rewound"])
            if "order" in told:
                self._desk.order.load_state_dict(told["order"])
            reins = self._footing.reins
            for optimizers, asked in self._desk.judge.restraints:
                if asked != StepOverrides() and reins.objection(asked) is None:
                    reins.set(asked, optimizers)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            notes.append(f"the judge begins anew, since what it knew was of another version: {error!r}")
        values = {"step": resumed.step, "seconds": round(seconds, 3), "notes": notes}
        self._herald.tell("resumed", f"resumed from {resumed.checkpoint} at step {resumed.step}", values)
        for note in notes:
            log.warning("surefoot: resumed, but %s", note)
        self._prove(resumed)

    def _prove(self, resumed: Resumed) -> None:
        """Say how far it is proven that the run is what it was.

        A run whose proof fails goes on. Where the state is the saved one to the bit and the loss is another, the cause
        lies outside the checkpoint, and an older one would have it too.
        """
        proof = resumed.replay
        words = f"the state {_STATE[resumed.equal]}"
        values = {"state": resumed.equal, "probe": "none"}
        if proof is None or proof.verdict == "none":
            words += f"; only that is proven: {'' if proof is None else proof.message}".rstrip(": ")
        else:
            words += f"; {proof.message}"
            values |= {
                "probe": proof.verdict,
                "loss": proof.loss,
                "was": proof.saved_loss,
                "tolerance": proof.tolerance,
            }
        failed = resumed.equal is False or values["probe"] == "differs"
        self._herald.tell("unproven" if failed else "proved", words, values)

    # -- with care

    def _go_carefully(self) -> None:
        """The run before this one crashed, and nobody knows why: smaller steps until it is clear that it goes well."""
        count = len(self._herald.rounds.gates)
        self._careful = StepOverrides(lr_factor=0.5, clip=(0.5,) * count)
        self._free_at = self._desk.step + self._policy.relax_after
        self._footing.reins.set(self._careful)
        self._herald.tell("careful", "resumed after a crash with half the rate, and gradients clipped at 0.5")

    def loosen(self) -> None:
        """A row was read: has it gone well for long enough?"""
        if self._careful is None or self._desk.step < self._free_at:
            return
        if self._footing.reins.lift(self._careful):  # else the judge has asked for something of its own
            words = f"{self._policy.relax_after} updates went well: the rate is the loop's again"
            self._herald.tell("loosened", words)
        self._careful = None


def _crashed(run_dir: Path) -> bool:
    """Whether the run before this one ended without a word: neither closed nor told to stop."""
    said = [event.get("name") for event in read(run_dir).events if event["kind"] in ("note", "checkpoint")]
    starts = [at for at, name in enumerate(said) if name == "attached"]
    if len(starts) < 2:
        return False
    return not {"closed", "stopped"} & set(said[starts[-2] : starts[-1]])

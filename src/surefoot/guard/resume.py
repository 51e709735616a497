"""Resumes a run: loads the newest intact checkpoint, verifies it, and takes smaller steps after a crash."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from surefoot.checkpoint.manager import CheckpointManager, Resumed
from surefoot.guard.context import GuardContext
from surefoot.guard.guard_state import load_judge_state
from surefoot.guard.metrics_reader import CheckpointEventLog, MetricsReader
from surefoot.guard.recovery import Recovery
from surefoot.journal.reader import read
from surefoot.records import StepOverrides

log = logging.getLogger("surefoot")
_STATE = {
    None: "was saved by another number of ranks and cannot be compared",
    True: "is the saved one, bit for bit",
    False: "has another hash than the one that was saved",
}


class Resumer:
    """Restores one run, and lifts the caution after a crash once the run is healthy."""

    def __init__(
        self,
        context: GuardContext,
        manager: CheckpointManager,
        *,
        events: CheckpointEventLog,
        reader: MetricsReader,
        recovery: Recovery,
    ) -> None:
        self._policy, self._run_dir = context.policy, context.run_dir
        self._manager, self._events, self._reader, self._recovery = manager, events, reader, recovery
        self.caution: StepOverrides | None = None
        """The overrides in force after a crash, until the run is known to be healthy."""
        self._relax_at_step = 0

    def resume(self) -> Resumed | None:
        """Resume from the newest intact checkpoint, if there is one: rank 0 chooses it, all ranks load it."""
        ranks = self._events.pipeline.grad_stats.ranks
        name, error = None, None
        if ranks.rank == 0:
            self._manager.clean()
            try:
                checkpoint = self._manager.newest()
                name = None if checkpoint is None else checkpoint.name
            except ValueError as reason:
                error = reason
        name, message = ranks.broadcast((name, None if error is None else str(error)))
        if message is not None:
            raise error or ValueError(message)
        if name is None:
            return None
        checkpoint = self._manager.store.get(name)
        if checkpoint is None:
            raise ValueError(f"this rank does not see {name} in {self._manager.store.root}: is it the same disk?")
        began = time.monotonic()
        resumed = self._manager.resume(checkpoint)
        self._restore_guard(resumed, time.monotonic() - began)
        if self._policy.cautious_after_crash and ranks.broadcast(_crashed(self._run_dir)):
            self._be_cautious()
        return resumed

    def _restore_guard(self, resumed: Resumed, seconds: float) -> None:
        """Restore what the guard itself knew: judge, history, order of the optimizers, overrides."""
        self._reader.step = resumed.step
        state = resumed.guard or {}
        notes = [*resumed.notes, *map(str, state.get("inexact", ()))]
        notes += load_judge_state(state, self._reader, self._recovery)
        values = {"step": resumed.step, "seconds": round(seconds, 3), "notes": notes}
        self._events.record("resumed", f"resumed from {resumed.checkpoint} at step {resumed.step}", values)
        for note in notes:
            log.warning("surefoot: resumed, but %s", note)
        self._report_proof(resumed)

    def _report_proof(self, resumed: Resumed) -> None:
        """Record how far it is verified that the run is what it was.

        A run whose verification fails is not stopped. Where the state is the saved one bit for bit and the loss
        differs, the cause lies outside the checkpoint, and an older one would have the same problem.
        """
        proof = resumed.replay
        message = f"the state {_STATE[resumed.equal]}"
        values = {"state": resumed.equal, "probe": "none"}
        if proof is None or proof.verdict == "none":
            message += f"; only that is verified: {'' if proof is None else proof.message}".rstrip(": ")
        else:
            message += f"; {proof.message}"
            values |= {
                "probe": proof.verdict,
                "loss": proof.loss,
                "was": proof.saved_loss,
                "tolerance": proof.tolerance,
            }
        failed = resumed.equal is False or values["probe"] == "differs"
        self._events.record("unproven" if failed else "proved", message, values)

    # -- caution after a crash

    def _be_cautious(self) -> None:
        """The previous run crashed for an unknown reason: take smaller steps until this one is known to be healthy."""
        count = len(self._events.pipeline.gates)
        self.caution = StepOverrides(lr_factor=0.5, clip=(0.5,) * count)
        self._relax_at_step = self._reader.step + self._policy.relax_after
        self._recovery.overrides.set(self.caution)
        self._events.record(
            "careful", "resumed after a crash with half the learning rate, and gradients clipped at 0.5"
        )

    def relax(self) -> None:
        """A row was read: lift the caution if the run has been healthy for long enough."""
        if self.caution is None or self._reader.step < self._relax_at_step:
            return
        if self._recovery.overrides.lift(self.caution):  # else the judge has set overrides of its own
            message = f"{self._policy.relax_after} updates were healthy: the learning rate is the loop's again"
            self._events.record("loosened", message)
        self.caution = None


def _crashed(run_dir: Path) -> bool:
    """Whether the previous run in this directory ended without being closed or stopped."""
    names = [event.get("name") for event in read(run_dir).events if event["kind"] in ("note", "checkpoint")]
    starts = [at for at, name in enumerate(names) if name == "attached"]
    if len(starts) < 2:
        return False
    return not {"closed", "stopped"} & set(names[starts[-2] : starts[-1]])

"""After running out of memory: begins an update again in the engine, saves and explains a loop that it ended."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surefoot.actions.rewind import rewind
from surefoot.checkpoint.rng import set_rng_states
from surefoot.gate.veto import VetoMethod
from surefoot.guard.hooks import HasSwitch
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.out_of_memory import first_line, is_out_of_memory
from surefoot.guard.recovery import Recovery
from surefoot.judge.cause_catalog import CAUSES
from surefoot.records import EVENT_MARK, Action, Cause, Decision, Diagnosis

if TYPE_CHECKING:
    from surefoot.guard.checkpointer import Checkpointer

log = logging.getLogger("surefoot")
NOTE = "memory"
"""The note with the plan that a run arrived at; a resumed run reads it."""


class UpdateRestart:
    """What an attached guard has to do when an update is begun again, or ends a loop, for want of memory."""

    def __init__(
        self,
        guard: HasSwitch,
        recovery: Recovery,
        reader: MetricsReader,
        checkpointer: Checkpointer | None,
    ) -> None:
        self._guard, self._recovery, self._reader = guard, recovery, reader
        self._save = None if checkpointer is None else checkpointer.save_failed_update
        self._explained = False

    # -- the engine begins an update again

    def restart(self, num_batches: int) -> bool:
        """Forget the update in progress, of which no optimizer has completed its step: it keeps its number.

        It has come to its micro-batch `num_batches`. Buffers and torch's random states are again what they were before
        its first forward pass. Returns whether an optimizer that was within its step is back where it was before.
        """
        if self._guard.disabled:
            return False
        pipeline = self._recovery.pipeline
        k, restored = pipeline.in_step, True
        if k is not None:
            gate = pipeline.gates[k]
            restored = gate.veto_method is VetoMethod.COPY
            gate.refused, pipeline.in_step = True, None  # undo it as a refused step
            gate.after_step()
            self._recovery.overrides.after_step(k)
        pipeline.restart_attempt()
        if self._recovery.shadow is not None:
            self._recovery.shadow.commit_or_revert(True, keep=False)
        recorder = self._recovery.recorder
        states = None if recorder is None else recorder.restart(num_batches)
        if states is not None:
            set_rng_states(states)
        ring = self._recovery.ring
        if ring is not None and pipeline.device.type == "cuda":  # surefoot's own share of the memory
            ring.limit(ring.size - 1)
        return restored

    def rewind(self) -> int:
        """Go back to the newest snapshot, because an optimizer's step ended half-way; returns its step.

        Raises `CannotAct` where there is none.
        """
        self._drain()
        state = rewind(self._recovery, onset_known=True)
        if self._recovery.recorder is not None:
            self._recovery.recorder.forget_after(state.attempt)
        return state.step

    def record(self, action: Action, reason: str, plan: Mapping[str, Any]) -> None:
        """Write to the journal what was done, and the plan from here on, at once: a kill may follow."""
        reader, pipeline = self._reader, self._recovery.pipeline
        if pipeline.grad_stats.ranks.world_size == 1:  # all ranks read rows with the same delay
            self._drain()
        at = self._at()
        reader.journal.event(Decision(**at, action=action, reason=reason, cause=Cause.OUT_OF_MEMORY))
        reader.note(NOTE, reason, values=plan, attempt=pipeline.attempt)
        reader.journal.flush()
        if reader.journal.rank == 0:
            log.warning("surefoot: step %d: %s", reader.step, reason, extra={EVENT_MARK: True})
        else:  # the first rank's console does not have it from its journal
            log.error("surefoot: step %d: %s", reader.step, reason)

    def save(self) -> bool:
        """Save the run as it was before the update in progress; returns whether that was done."""
        return self._save is not None and not self._guard.disabled and self._save()

    def _at(self) -> dict[str, Any]:
        """Where an event belongs."""
        reader = self._reader
        return {"step": reader.step, "attempt": self._recovery.pipeline.attempt, "rank": reader.journal.rank}

    def _drain(self) -> None:
        """Read the rows that are still under way."""
        for block, context in self._recovery.pipeline.arrived_blocks(drain=True):
            self._recovery.row_read(self._reader.read(block, context))

    # -- a loop ends

    def ended_by_memory(self) -> bool:
        """Whether the loop ends because memory ran out; the run is then saved, and the way out explained, once."""
        error = sys.exception() or getattr(sys, "last_value", None)  # now, or at the exit of the process
        if error is None or self._guard.disabled or not is_out_of_memory(error):
            return False
        if self._explained:
            return True
        self._explained = True
        in_step = self._recovery.pipeline.in_step is not None
        saved = self.save()
        advice = CAUSES[Cause.OUT_OF_MEMORY].remedies
        where = "in optimizer.step()" if in_step else "in an update of which nothing was applied"
        if saved:
            kept = f"The run is saved as it was before that update, at step {self._reader.step}."
        elif self._save is None:
            kept = "It is not saved: attach(..., resume=True) saves runs."
        else:
            why = "its weights may be half-way between two updates" if in_step else "see the journal"
            kept = f"It is not saved now ({why}): earlier checkpoints are kept."
        detail = f"Out of memory {where}: {first_line(error)}. {kept}"
        at = self._at()
        evidence = {"error": first_line(error), "saved": saved, "within_step": in_step}
        self._reader.journal.event(
            Diagnosis(**at, cause=Cause.OUT_OF_MEMORY, confidence=1.0, evidence=evidence, advice=advice, detail=detail)
        )
        log.error("surefoot: %s What to do: %s", detail, " ".join(advice))
        return True

"""Keeps a run going that runs out of memory: the same updates in smaller micro-batches, then with checkpointing.

An update that fails is made again with the same samples. Nothing of it has been applied: its gradients are dropped, and
the guard restores buffers and random states. With several ranks each repeats its own part, as long as it has not yet
begun to exchange gradients; where that is not possible, the run ends, and a restart continues in smaller micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot import parallel
from surefoot.actions.action_context import CannotAct
from surefoot.actions.stop import TrainingStopped
from surefoot.guard.attach import Guard
from surefoot.guard.update_restart import NOTE
from surefoot.journal.reader import read
from surefoot.records import Action
from surefoot.train import exit_codes, speed
from surefoot.train.accumulation import MicroBatches
from surefoot.train.build import RunParts
from surefoot.train.memory_advice import needed
from surefoot.train.split_batch import CannotSplit, Piece, num_samples, split_batch
from surefoot.train.update_attempt import Phase, UpdateAttempt

PATIENCE = 50
"""Updates that fit before larger micro-batches are tried again; doubled each time that they do not fit."""


class EvaluationDoesNotFit(Exception):
    """Not even one sample can be evaluated."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What limits the memory of an update."""

    rows: int
    """Samples in one micro-batch, at most."""
    eval_rows: int
    """The same in an evaluation."""
    checkpointing: bool = False
    """All blocks recompute their activations in backward."""


class MemoryRecovery:
    """Decides how much is computed at a time. Without `enabled`, running out of memory ends the run."""

    def __init__(self, parts: RunParts, guard: Guard, *, enabled: bool = True) -> None:
        recipe = parts.recipe
        self._parts, self._restarts = parts, guard.restarts
        self.enabled = enabled and recipe.protection.mode == "protect" and guard.restarts is not None
        self.full = MemoryPlan(recipe.batch.size, recipe.batch.size)
        self.plan = self.full
        self.failures = 0
        """How often memory ran out."""
        self.failures_elsewhere = 0
        """The same on the other ranks, known at the end of the run."""
        self._tried: list[str] = []
        """What did not fit in the current update."""
        self._patience, self._fitted, self._grown = PATIENCE, 0, False
        self._why_whole = ""
        """Why batches cannot be split."""
        norms = any(isinstance(m, _BatchNorm) for m in parts.model.modules())
        self._least_rows = 2 if norms else 1  # batch norm cannot train on one sample
        self._blocks = sum(map(len, speed.block_stacks(parallel.unwrap_model(parts.model))))
        self._unreported_norms = norms

    def resume(self, run_dir: Path) -> str | None:
        """Continue with the smallest micro-batches that a rank had arrived at; returns a note about them."""
        if not self.enabled:
            return None
        notes = [e for e in read(run_dir).events if e["kind"] == "note" and e.get("name") == NOTE]
        last = {e["rank"]: e["values"] for e in notes if e["values"].get("size") == self.full.rows}
        if not last:
            return None
        rows = min(int(values["rows"]) for values in last.values())
        eval_rows = min(int(values["eval_rows"]) for values in last.values())
        plan = MemoryPlan(rows, eval_rows, any(values["checkpointing"] for values in last.values()))
        if plan == self.full:
            return None
        self._adopt(plan)
        later = "" if self._parts.world.size > 1 else f"; larger ones are tried again after {PATIENCE} updates"
        return f"the run had run out of memory and continues with {self.describe(plan)}{later}"

    # -- updates

    def attempts(self, batches: MicroBatches[Any]) -> Iterator[UpdateAttempt]:
        """One attempt at the update of these batches; after it has run out of memory another, in less memory."""
        self._tried = []
        while True:
            attempt = UpdateAttempt(self._pieces(batches), len(batches), catch=self.enabled)
            yield attempt
            if attempt.failure is None:
                break
            self._recover(attempt, batches)
        if self.plan.rows < self.full.rows:
            self._fits()

    def _pieces(self, batches: MicroBatches[Any]) -> list[Piece]:
        if self.plan.rows >= self.full.rows:
            return [Piece(batch) for batch in batches]
        try:
            return self._split(batches, self.plan.rows)
        except CannotSplit as why:
            self._why_whole = str(why)
            return [Piece(batch) for batch in batches]

    def _split(self, batches: MicroBatches[Any], rows: int) -> list[Piece]:
        full = self.full.rows
        return [p for b in batches for p in split_batch(b, rows, at_least=self._least_rows, largest=full)]

    def _recover(self, attempt: UpdateAttempt, batches: MicroBatches[Any]) -> None:
        """Drop what the failed attempt has left, and find out how the next one needs less."""
        assert self._restarts is not None
        parts, phase = self._parts, attempt.phase
        self.failures += 1
        self._tried.append(self.describe(self.plan))
        plan = self._smaller_plan(attempt, batches)
        what = f"out of memory {phase} ({attempt.failure})"
        if not self._repeatable(attempt):
            self._end_for_restart(what, plan)
        if phase is not Phase.COPY or attempt.number > 1:
            parallel.forward_failed(parts.model)
        for optimizer in parts.optimizers:
            optimizer.zero_grad()
        if parts.precision.scaler is not None:
            parts.precision.scaler._per_optimizer_states.clear()  # else gradients count as unscaled already
        unchanged = attempt.step is None or attempt.step.unchanged()
        restored = self._restarts.restart(attempt.number)
        again = f"the update of {parts.effective_batch} samples is made again"
        if not unchanged and not restored:
            again = self._rewind(what)
        self._free_memory()
        if phase is Phase.STEP and len(self._tried) == 1:  # its memory does not depend on the micro-batch: only free it
            self._record(Action.REDUCE_MEMORY, f"{what}: caches are freed, and {again}")
            return
        if plan is None:
            self._stop(what)
        if self._grown:
            self._patience, self._grown = 2 * self._patience, False
        change = self._change(plan)
        self._adopt(plan)
        self._record(Action.REDUCE_MEMORY, f"{what}: {change}; {again}{self._batch_norm_note()}")

    def _smaller_plan(self, attempt: UpdateAttempt, batches: MicroBatches[Any]) -> MemoryPlan | None:
        """The next plan to try; None if there is none."""
        rows = min(self.plan.rows, max(num_samples(piece.batch) for piece in attempt.pieces) or self.plan.rows)
        if rows > self._least_rows:
            rows = max(self._least_rows, (rows + 1) // 2)
            try:
                self._split(batches, rows)
                return replace(self.plan, rows=rows)
            except CannotSplit as why:
                self._why_whole = str(why)
        if self._blocks and not self.plan.checkpointing and self._parts.recipe.speed.checkpoint_activations != 1:
            return replace(self.plan, checkpointing=True)
        return None

    def _repeatable(self, attempt: UpdateAttempt) -> bool:
        """Whether this rank can make its part again unnoticed by the others, who wait for it in a later collective."""
        parts = self._parts
        if parts.world.size == 1:
            return True
        if parallel.shards_weights(parts.recipe.parallel.strategy, parts.world):
            return False  # each forward and backward pass gathers weights
        if any(isinstance(module, nn.SyncBatchNorm) for module in parts.model.modules()):
            return False
        exchanging = attempt.phase is Phase.STEP or (attempt.phase is Phase.BACKWARD and attempt.at_last)
        return not exchanging

    def _rewind(self, what: str) -> str:
        """The optimizer's step ended half-way: go back to a snapshot."""
        assert self._restarts is not None
        try:
            step = self._restarts.rewind()
        except CannotAct as why:
            self._end_for_restart(f"{what}, half-way through it, and {why}", self.plan)
        return f"the run goes back to step {step}, because the step had changed a part of the weights"

    def _fits(self) -> None:
        """An update has fitted into memory; after many of them try larger micro-batches again."""
        self._fitted += 1
        if self._fitted < self._patience or self._parts.world.size > 1:  # one rank's failure might end all of them
            return
        plan = replace(self.plan, rows=min(2 * self.plan.rows, self.full.rows))
        reason = f"{self._fitted} updates have fitted into memory: {self._change(plan)} is tried again"
        self._adopt(plan)
        self._grown = True
        self._record(Action.RELAX, reason)

    # -- evaluations

    def eval_attempts(self, batch: Any) -> Iterator[UpdateAttempt]:
        """The same for a batch of an evaluation."""
        while True:
            rows = self.plan.eval_rows
            whole = rows >= self.full.eval_rows
            pieces = [Piece(batch)] if whole else split_batch(batch, rows, largest=self.full.eval_rows)
            attempt = UpdateAttempt(pieces, 1, catch=self.enabled)
            yield attempt
            if attempt.failure is None:
                return
            self._recover_evaluation(attempt, batch)

    def _recover_evaluation(self, attempt: UpdateAttempt, batch: Any) -> None:
        parts = self._parts
        self.failures += 1
        rows = (min(self.plan.eval_rows, num_samples(batch) or 1) + 1) // 2
        what = f"out of memory in an evaluation ({attempt.failure})"
        if parallel.shards_weights(parts.recipe.parallel.strategy, parts.world):
            self._end_for_restart(what, replace(self.plan, eval_rows=rows))
        parallel.forward_failed(parts.model)
        self._free_memory()
        try:
            if num_samples(attempt.pieces[0].batch) <= 1:
                raise CannotSplit("one sample alone is too much")
            split_batch(batch, rows, largest=self.full.eval_rows)
        except CannotSplit as why:
            if parts.world.size > 1:
                self._end_for_restart(f"{what}; {why}", None)
            self._record(Action.REDUCE_MEMORY, f"{what}: the evaluation is left out, since {why}")
            raise EvaluationDoesNotFit from None
        change = f"{self.plan.eval_rows} -> {rows} samples at a time in evaluations"
        self._adopt(replace(self.plan, eval_rows=rows))
        self._record(Action.REDUCE_MEMORY, f"{what}: {change}")

    # -- what is done

    def _adopt(self, plan: MemoryPlan) -> None:
        if plan.checkpointing and not self.plan.checkpointing:
            speed.checkpoint_activations(parallel.unwrap_model(self._parts.model), 1)
            if self._parts.recipe.speed.compile:
                torch.compiler.reset()
        self.plan, self._fitted = plan, 0

    def _free_memory(self) -> None:
        gc.collect()
        if self._parts.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _record(self, action: Action, reason: str) -> None:
        assert self._restarts is not None
        self._restarts.record(action, reason, self._values(self.plan))

    def _values(self, plan: MemoryPlan) -> Mapping[str, Any]:
        return asdict(plan) | {"size": self.full.rows, "failures": self.failures}

    def _end_for_restart(self, what: str, plan: MemoryPlan | None) -> NoReturn:
        """The ranks cannot make the update again together: end this one, and let a restart do with less memory."""
        assert self._restarts is not None
        if plan is None:
            self._stop(what)
        reason = (
            f"{what}: this cannot be made again while other ranks wait for it; a restart uses {self.describe(plan)}"
        )
        if self._parts.world.size == 1:
            reason = f"{what}: a restart continues from the newest checkpoint with {self.describe(plan)}"
        self._restarts.record(Action.REDUCE_MEMORY, reason, self._values(plan))
        raise exit_codes.OutOfMemoryRestart(f"{reason[0].upper()}{reason[1:]}")

    def _stop(self, what: str) -> NoReturn:
        """Nothing is left to try: save the run and explain what it needs."""
        assert self._restarts is not None
        saved = self._restarts.save()
        kept = f"The run is saved at step {self._parts.step}" if saved else "Earlier checkpoints are kept"
        whole = f" Batches cannot be split: {self._why_whole}." if self._why_whole else ""
        reason = f"{what}. Tried: {', '.join(self._tried)}.{whole} {kept}. {needed(self._parts)}"
        self._restarts.record(Action.STOP, reason, self._values(self.plan))
        raise TrainingStopped(f"surefoot stopped the run: {reason}")

    # -- in words

    def describe(self, plan: MemoryPlan) -> str:
        """A plan in words."""
        checkpointing = ", activation checkpointing" if plan.checkpointing else ""
        evaluations = f", {plan.eval_rows} in evaluations" if plan.eval_rows < self.full.eval_rows else ""
        return f"micro-batches of {plan.rows} (accumulation {self._accumulation(plan)}){evaluations}{checkpointing}"

    def summary(self) -> str | None:
        """A line for the end of the run; None if memory never ran out."""
        if not self.failures and not self.failures_elsewhere and self.plan == self.full:
            return None
        times = f"{self.failures} time{'' if self.failures == 1 else 's'}"
        if self.failures_elsewhere:
            times += f" on this rank, {self.failures_elsewhere} on others"
        return f"ran out {times}; at the end {self.describe(self.plan)}, the same samples per update"

    def _accumulation(self, plan: MemoryPlan) -> int:
        return self._parts.recipe.batch.accumulate * -(-self.full.rows // plan.rows)

    def _change(self, plan: MemoryPlan) -> str:
        if plan.checkpointing and not self.plan.checkpointing:
            return f"activation checkpointing is switched on for {self._blocks} blocks"
        old, new = self._accumulation(self.plan), self._accumulation(plan)
        return f"micro-batch {self.plan.rows} -> {plan.rows} samples, accumulation {old} -> {new}"

    def _batch_norm_note(self) -> str:
        if not self._unreported_norms or self.plan.rows >= self.full.rows:
            return ""
        self._unreported_norms = False
        return f". Batch norm now sees {self.plan.rows} samples at a time, not {self.full.rows}"

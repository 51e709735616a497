"""Runs the first refused step of an incident again and puts where it went wrong into the diagnosis."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.snapshots import SnapshotRing
from surefoot.guard.context import GuardContext
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.judge.judge import Judge
from surefoot.origin.locate import locate_in_step, locate_large
from surefoot.origin_record import Origin
from surefoot.records import EVENT_MARK, REFUSED, StepMetrics, Verdict
from surefoot.trials.kept_steps import KeptStep, StepRecorder
from surefoot.trials.sandbox import Sandbox, StepFn

log = logging.getLogger("surefoot")
MAX_SHARE = 0.05
"""Part of the run's time that may go into looking for origins, beyond the first few."""
ALWAYS = 3
"""How often an origin is looked for, whatever it costs."""
NOT_KEPT = "the origin was not looked for: the batch of attempt {attempt} is not kept any more, or was changed"
NEEDS_RANKS = (
    "the origin was not looked for: the model is sharded, so that one rank alone cannot run the step again; run "
    "surefoot.locate(model, batch, step_fn) on all ranks at once"
)
NOT_AGAIN = "the refused step was run again from its batch, and loss and gradients were finite"


@runtime_checkable
class KnowsSamples(Protocol):
    """A loader that knows which samples of its data set a batch was made of."""

    num_fetched: int

    def samples_of(self, number: int) -> list[int]: ...

    def ban(self, samples: Any) -> None: ...


class OriginControl:
    """Looks for the origin of a refused update, once for each verdict of an incident."""

    def __init__(
        self,
        context: GuardContext,
        step_fn: StepFn,
        reader: MetricsReader,
        judge: Judge,
        recorder: StepRecorder,
        *,
        sandbox: Sandbox,
        guard_off: Callable[[], AbstractContextManager[None]],
        loss_scale: Callable[[], Any],
    ) -> None:
        self._context, self._step_fn, self._reader, self._judge = context, step_fn, reader, judge
        self._recorder, self._sandbox = recorder, sandbox
        self._guard_off, self._loss_scale = guard_off, loss_scale
        self._looked_for: set[Verdict] = set()
        """Verdicts of this incident whose origin was looked for."""
        self._pending: StepMetrics | None = None
        self._count, self._seconds, self._began = 0, 0.0, time.monotonic()

    def row_read(self, row: StepMetrics) -> None:
        """A row was read and judged: note the first of an incident that was refused."""
        if row.applied:
            if self._looked_for and self._judge.quiet:
                self._looked_for.clear()
        elif row.verdict in REFUSED and row.verdict not in self._looked_for:
            self._looked_for.add(row.verdict)
            self._pending = row

    def locate_pending(self, ring: SnapshotRing | None) -> None:
        """At the end of an iteration: look for the origin of the row that was noted; never raises."""
        row, self._pending = self._pending, None
        if row is None or not self._affordable():
            return
        began = time.monotonic()
        try:
            self._locate(row, ring)
        except Exception as error:  # of the user's model, or out of memory: training goes on
            message = f"the origin was not found: {type(error).__name__}: {error}"
            self._reader.note("origin", message, row=row)
            log.info("surefoot: step %d: %s", row.step, message)
        self._count += 1
        self._seconds += time.monotonic() - began

    def _affordable(self) -> bool:
        return self._count < ALWAYS or self._seconds < MAX_SHARE * (time.monotonic() - self._began)

    def _locate(self, row: StepMetrics, ring: SnapshotRing | None) -> None:
        if needs_ranks(self._context.model):
            self._reader.note("origin", NEEDS_RANKS, row=row)
            return
        if row.rank >= 0 and row.rank != self._reader.journal.rank:
            return  # the rank whose values are not finite looks for it
        step = next((s for s in self._recorder if s.attempt == row.attempt), None)
        if step is None or not step.batches or not step.intact():
            self._reader.note("origin", NOT_KEPT.format(attempt=row.attempt), row=row)
            return
        with self._guard_off():
            origin = self._origin_of(row, step)
            if not origin and ring is not None:
                origin = self._origin_in_old_state(row, step, ring) or origin
        if not origin:
            if row.verdict is Verdict.NONFINITE:
                self._reader.note("origin", NOT_AGAIN, row=row, values=origin.as_json())
            return
        self._report(row, replace(origin, dataset_samples=self._samples_in_dataset(origin, step)))

    def _origin_of(self, row: StepMetrics, step: KeptStep) -> Origin:
        seconds, scale = self._context.policy.trial_seconds, self._loss_scale()
        model, batches = self._context.model, step.batches
        if row.verdict is Verdict.NORM_OUTLIER:
            limit = row.norm_limit if math.isfinite(row.norm_limit) else row.norm / 2
            max_norm = max(limit, row.norm / 4)
            return locate_large(
                model, batches, self._step_fn, rng_states=step.rng_states, max_norm=max_norm, deadline=seconds
            )
        return locate_in_step(
            model,
            batches,
            self._step_fn,
            rng_states=step.rng_states,
            loss_factor=1.0 if scale is None else float(scale),  # a wait for the device, after an update was refused
            deadline=seconds,
        )

    def _origin_in_old_state(self, row: StepMetrics, step: KeptStep, ring: SnapshotRing) -> Origin | None:
        """Try again with the weights that the step had: those of the last snapshot, trained up to it."""
        early = [s for s in ring.snapshots if s.attempt < row.attempt]
        if not early:
            return None
        before = [s for s in self._recorder.since(early[-1].attempt + 1) if s.attempt < row.attempt]
        with self._sandbox.opened():
            self._sandbox.restore(early[-1].copy)
            for earlier in before:
                self._sandbox.train_step(earlier, options=earlier.options, apply=earlier.applied)
            return self._origin_of(row, step)

    def _samples_in_dataset(self, origin: Origin, step: KeptStep) -> tuple[int, ...]:
        """The numbers of the samples to blame in the loader's data set, where the loader knows them."""
        loader = self._context.loader
        if not origin.samples or not isinstance(loader, KnowsSamples):
            return ()
        number = step.fetched[origin.microbatch]
        if len(set(step.fetched)) == 1:  # the loop has fetched all micro-batches before it used the first
            number -= len(step.fetched) - 1 - origin.microbatch
        known = loader.samples_of(number)
        return tuple(known[i] for i in origin.samples if i < len(known))

    def _report(self, row: StepMetrics, origin: Origin) -> None:
        for event in self._judge.located(row, origin.module, origin.module_type, origin=origin):
            self._reader.journal.event(event)
        log.warning("surefoot: step %d: %s", row.step, origin, extra={EVENT_MARK: True})


def needs_ranks(model: nn.Module) -> bool:
    """Whether a forward pass needs the other ranks, too."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(
        isinstance(p, DTensor) for p in model.parameters()
    )

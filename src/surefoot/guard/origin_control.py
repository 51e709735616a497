"""Runs the first refused step of an incident again and puts where it went wrong into the diagnosis."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from surefoot.checkpoint.snapshots import SnapshotRing
from surefoot.guard.context import GuardContext
from surefoot.guard.hooks import HasSwitch, switched_off
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.judge.judge import Judge
from surefoot.origin.locate import locate_in_step, locate_large
from surefoot.origin.untouched import NEEDS_RANKS, needs_ranks
from surefoot.origin_record import Origin
from surefoot.records import EVENT_MARK, REFUSED, StepMetrics, Verdict
from surefoot.trials.kept_steps import KeptStep, StepRecorder
from surefoot.trials.sandbox import Sandbox, StepFn

log = logging.getLogger("surefoot")
MAX_SHARE = 0.05
"""Part of the run's time that may go into looking for origins, beyond the first few."""
ALWAYS = 3
"""How often an origin is looked for, whatever it costs."""
KEPT_STEPS = 4
"""Steps kept where no trial needs more: a row is read two steps later."""
NOT_KEPT = "the origin was not looked for: the batch of attempt {attempt} is not kept any more, or was changed"
NOT_AGAIN = "the refused step was run again from its batch, and loss and gradients were finite"


@runtime_checkable
class KnowsSamples(Protocol):
    """A loader that knows which samples of its data set a batch was made of."""

    num_fetched: int

    def samples_of(self, number: int) -> list[int]: ...

    def ban(self, samples: Any) -> None: ...


@runtime_checkable
class NamesSamples(Protocol):
    """A loader that knows where a sample comes from: its file and line, or its row."""

    def source_of(self, sample: int) -> str: ...


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
        guard: HasSwitch,
        loss_scale: Callable[[], Any],
        sandbox: Sandbox | None = None,
    ) -> None:
        self._context, self._step_fn, self._reader, self._judge = context, step_fn, reader, judge
        self.recorder, self._sandbox = recorder, sandbox
        self._guard, self._loss_scale = guard, loss_scale
        self._alone = sandbox is not None
        """No other rank takes part in the run, whose batch it may have been."""
        self.looked_for: set[Verdict] = set()
        """Verdicts of this incident whose origin was looked for; empty while nothing is wrong."""
        self.pending: StepMetrics | None = None
        """The refused row whose origin is still to be looked for."""
        self.ban: Callable[[StepMetrics, Origin | None], bool] | None = None
        """Bans the samples to blame, and says whether it did; the same on all ranks."""
        self._count, self._seconds, self._began = 0, 0.0, time.monotonic()

    def row_read(self, row: StepMetrics) -> None:
        """A row was read and judged: note the first of an incident that was refused."""
        if row.applied:
            if self._judge.quiet:
                self.looked_for.clear()
        elif row.verdict in REFUSED and row.verdict not in self.looked_for:
            self.looked_for.add(row.verdict)
            self.pending = row

    def locate_pending(self, ring: SnapshotRing | None) -> None:
        """At the end of an iteration: look for the origin of the row that was noted, and have samples banned that are
        to blame; with several ranks all of them call this for the same row."""
        row, self.pending = self.pending, None
        if row is None:
            return
        affordable = self._affordable()
        origin = self._look_for(row, ring) if affordable else None
        if not affordable and self._alone:
            self.looked_for.discard(row.verdict)  # the next refusal may find the time
        if self.ban is not None and self.ban(row, origin):
            self.looked_for.discard(row.verdict)  # it was the data: a later refusal may be another sample's
            origin = None if origin is None else replace(origin, banned=bool(origin.dataset_samples))
        if origin:
            self._report(row, origin)

    def _look_for(self, row: StepMetrics, ring: SnapshotRing | None) -> Origin | None:
        """The origin of this row; never raises."""
        began = time.monotonic()
        try:
            origin = self._locate(row, ring)
        except Exception as error:  # of the user's model, or out of memory: training goes on
            self._not_found(row, f"the origin was not found: {type(error).__name__}: {error}")
            origin = None
        self._count += 1
        self._seconds += time.monotonic() - began
        return origin

    def _affordable(self) -> bool:
        return self._count < ALWAYS or self._seconds < MAX_SHARE * (time.monotonic() - self._began)

    def _locate(self, row: StepMetrics, ring: SnapshotRing | None) -> Origin | None:
        if row.rank not in (-1, self._reader.journal.rank) and not math.isfinite(row.loss):
            return None  # the rank whose loss is not finite looks for it; who has made a gradient so, all find out
        step = next((s for s in self.recorder if s.attempt == row.attempt), None)
        if step is None or not step.batches or not step.intact():
            self._not_found(row, NOT_KEPT.format(attempt=row.attempt))
            return None
        with switched_off(self._guard):
            origin = self._origin_of(row, step)
            if not origin and ring is not None and self._sandbox is not None:
                origin = self._origin_in_old_state(row, step, ring, self._sandbox) or origin
        if not origin:
            if row.verdict is Verdict.NONFINITE and self._alone:
                self._not_found(row, NOT_AGAIN)
            return None
        samples = self._samples_in_dataset(origin, step)
        return replace(origin, dataset_samples=samples, sources=self._sources_of(samples))

    def _not_found(self, row: StepMetrics, message: str) -> None:
        """From here on a NaN in the loss is traced as in a run without step_fn."""
        self._reader.traces_nan = True
        self._reader.note("origin", message, row=row)
        log.info("surefoot: step %d: %s", row.step, message)

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

    def _origin_in_old_state(
        self, row: StepMetrics, step: KeptStep, ring: SnapshotRing, sandbox: Sandbox
    ) -> Origin | None:
        """Try again with the weights that the step had: those of the last snapshot, trained up to it."""
        early = [s for s in ring.snapshots if s.attempt < row.attempt]
        if not early:
            return None
        before = [s for s in self.recorder.since(early[-1].attempt + 1) if s.attempt < row.attempt]
        with sandbox.opened():
            sandbox.restore(early[-1].copy)
            for earlier in before:
                sandbox.train_step(earlier, options=earlier.options, apply=earlier.applied)
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

    def _sources_of(self, samples: Sequence[int]) -> tuple[str, ...]:
        loader = self._context.loader
        return tuple(loader.source_of(sample) for sample in samples) if isinstance(loader, NamesSamples) else ()

    def _report(self, row: StepMetrics, origin: Origin) -> None:
        for event in self._judge.located(row, origin.module, origin.module_type, origin=origin):
            self._reader.journal.event(replace(event, rank=self._reader.journal.rank))
        level = self._context.verbosity.level_of_detail(logging.WARNING)
        log.log(level, "surefoot: step %d: %s", row.step, origin, extra={EVENT_MARK: True})


def origins_without_trials(
    guard: HasSwitch, context: GuardContext, reader: MetricsReader, loss_scale: Callable[[], Any]
) -> OriginControl | None:
    """For a run of several ranks in which no trials are run; None where no origins are wanted."""
    policy, judge = context.policy, reader.judge
    unwanted = policy.observe or policy.trial_seconds <= 0 or context.step_fn is None or len(context.optimizers) > 1
    if unwanted or not isinstance(judge, Judge):
        return None
    recorder = StepRecorder(context.optimizers, max_steps=KEPT_STEPS, loader=context.loader)
    return make_origins(guard, context, reader, judge, recorder, loss_scale)


def make_origins(
    guard: HasSwitch,
    context: GuardContext,
    reader: MetricsReader,
    judge: Judge,
    recorder: StepRecorder,
    loss_scale: Callable[[], Any],
    sandbox: Sandbox | None = None,
) -> OriginControl | None:
    """Looks for origins in the steps that this recorder keeps; None where one rank cannot run a step alone. Without a
    `sandbox` each of several ranks looks by itself."""
    if needs_ranks(context.model):
        log.info("surefoot: the origin of a non-finite value is traced to its module only: %s", NEEDS_RANKS)
        return None
    assert context.step_fn is not None
    return OriginControl(
        context, context.step_fn, reader, judge, recorder, guard=guard, loss_scale=loss_scale, sandbox=sandbox
    )

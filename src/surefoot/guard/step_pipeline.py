"""One attempted update on the device: gradients measured, gated, and the numbers sent to the host.

An attempt begins with the first backward after a step, and ends with the steps of all optimizers that use that
backward. Nothing here waits for the device unless a comment says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.buffers import BufferCheck, BufferShadow
from surefoot.gate.clip import clip_units
from surefoot.gate.gate import Gate
from surefoot.gate.rule import NormRule
from surefoot.gate.veto import VetoMethod
from surefoot.guard.context import GuardContext
from surefoot.guard.iteration_order import IterationOrder
from surefoot.guard.step_metrics import RankExchange, StepContext, learn_exempt_buffers, lr_and_momentum
from surefoot.measure.batch_stats import add_to_mean, find_float_tensor, measure_batch
from surefoot.measure.block_layout import AsyncReadback, HostBlock, SharedSlot, SummarySlot, VerdictSlot
from surefoot.measure.grad_stats import GradStats, SeenGrads
from surefoot.measure.layout import ParamLayout, layout_params, main_device
from surefoot.measure.nan_tracer import NanTracer
from surefoot.measure.resources import StepTimer, SystemMonitor
from surefoot.measure.weight_stats import AlternatingWeights, UpdateSample
from surefoot.records import NAN, JudgedBy, Verdict


class StepPipeline:
    """Follows the attempts at updating one set of tensors; replaced when the optimizers get other parameters."""

    attempt = 0
    judged_by: JudgedBy = JudgedBy.LOSS
    """Which number shows the progress of the current update."""
    in_line_search = False
    """An optimizer such as LBFGS is evaluating the loss again; only its starting point is judged."""
    in_step: int | None = None  # the optimizer whose step has begun and not ended
    check_weights = False
    """Measure the weights at the next step, though it is not their turn."""
    _sampled_attempt = -1
    """The attempt before which the weights were sampled."""
    _totals: Tensor | None = None
    """The summary over all ranks that the current attempt is decided on."""
    _measured_scale: tuple[Tensor, int] | None = None
    """The loss scale, and its version, when gradients were last measured."""

    def __init__(self, context: GuardContext, *, timer: StepTimer, shadow: BufferShadow | None) -> None:
        policy, optimizers = context.policy, context.optimizers
        self.layout: ParamLayout = layout_params(context.model, optimizers)
        self.scaler: Any = context.scaler
        self.samples = self.tokens = self.eval_loss = self._stale_grads = NAN
        """Reported or found since the last update."""
        self.proposals: dict[SharedSlot, float | Tensor] = {}
        """What this rank proposes to the others about snapshots."""
        self._model, self._optimizers, self._policy = context.model, optimizers, policy
        self._timer, self._shadow = timer, None if shadow is None or shadow.empty else shadow
        self.device = main_device(self.layout.params)
        units = clip_units(context.clip, self.layout)
        rule = NormRule(policy.max_norm_ratio, policy.warmup, policy.norm_max_decay)
        self.grad_stats = GradStats(
            self.layout, [u.span for u in units], self.device, buffers=0 if shadow is None else len(shadow.names)
        )
        block, ranks = self.grad_stats.block, self.grad_stats.ranks
        self.buffer_names = [] if shadow is None else list(shadow.names)
        """Names of the floating-point buffers, none where the policy only observes."""
        self.buffer_check: BufferCheck | None = None
        """None where the model has no floating-point buffers."""
        if shadow is not None and self.buffer_names:
            total = block.summary[SummarySlot.NONFINITE_BUFFERS]
            self.buffer_check = BufferCheck(shadow, block.buffer_nonfinite, total)
        self.gates = [
            Gate(k, o, units=units, params=self.layout.params, rule=rule, device=self.device)
            for k, o in enumerate(optimizers)
        ]
        self.nan_tracer = NanTracer(context.model)
        self.order = IterationOrder(len(self.gates))
        self._exchange = RankExchange(self.grad_stats, optimizers) if ranks.world_size > 1 else None
        self._system = SystemMonitor(self.device, every=policy.system_every)
        self.system_missing = self._system.missing
        self._readback: AsyncReadback[StepContext] = AsyncReadback(self.grad_stats.raw.numel(), self.device)
        self._verdicts = block.verdict.new_zeros(len(self.gates), len(VerdictSlot))
        self.stepped: set[int] = set()
        """Optimizers that have stepped in the current attempt."""
        self._grads_measured = self._weights_measured = self._grads_changed = self._inputs_measured = False
        """Gradients were measured; the block holds unsent numbers of the weights, of gradients that the loop has
        changed after backward, of the batch."""
        self._measured_grads = self._used_grads = SeenGrads(())
        """Gradients as they were last measured, and those that the last step used."""
        self._update_sample = UpdateSample(self.layout.params, ranks.owned, self.device)
        self._alternating: AlternatingWeights | None = None
        """None with a single optimizer."""
        if len(optimizers) > 1:
            self._alternating = AlternatingWeights(self.layout, ranks.owned, self.device, every=policy.weights_every)

    def loss_scale(self) -> Tensor | None:
        """The current loss scale, on the device."""
        return self.scaler._scale if self.scaler is not None and self.scaler.is_enabled() else None

    # -- 1. guard.watch

    def record_inputs(self, batch: Any) -> None:
        """Measure the batch, for the first micro-batch of an update."""
        if self.grad_stats.num_microbatches == 0 or self.stepped:
            values = find_float_tensor(batch, self.device)
            self._inputs_measured = values is not None
            if values is not None:
                slots = slice(SummarySlot.INPUT_MEAN, SummarySlot.INPUT_ABSMAX + 1)
                measure_batch(values, self.grad_stats.block.summary[slots])

    def record_progress(self, progress: Tensor | float | None) -> None:
        """Store the number that is judged instead of the loss: the mean over the micro-batches of an update."""
        self.judged_by = JudgedBy.NOTHING if progress is None else JudgedBy.PROGRESS
        if progress is None:
            return
        earlier = 0 if self.stepped else self.grad_stats.num_microbatches
        add_to_mean(progress, self.grad_stats.block.summary[SummarySlot.PROGRESS], earlier)

    # -- 2. backward

    def grads_discarded(self) -> bool:
        """Whether measured gradients are gone now, without any step."""
        if not self._grads_measured or self.stepped or self.in_line_search:
            return False
        scale, measured = self.loss_scale(), self._measured_scale
        if scale is not None and (measured is None or scale is not measured[0] or scale._version != measured[1]):
            return True  # the scaler has moved on to the next update
        return self._measured_grads.discarded()

    def find_stale_grads(self) -> bool:
        """As backward begins: whether the gradients that the last step used are still there, the same and unchanged."""
        used, self._used_grads = self._used_grads, SeenGrads(())
        if not used.seen or len(self.gates) > 1:  # several may use one backward
            return False
        # Some loops zero gradients behind torch's back. Looking at the values waits for the device, but only where the
        # tensors are the same; with several ranks each would find something else in its shard, so they do not look.
        stale = used.unchanged() and (self._exchange is not None or used.any_nonzero())
        self._stale_grads = float(stale)
        return stale

    def stale_grads_zeroed(self) -> None:
        """The stale gradients were set to zero before backward added to them."""
        self._stale_grads = 0.5

    def backward_ended(self, loss: Tensor, weight: Tensor, samples: float) -> None:
        """Measure all gradients; `weight` is the gradient that backward began with, and the weight of this loss."""
        if self.stepped:
            self._begin_attempt()
        scale = self.loss_scale()
        if scale is None:
            self.grad_stats.measure(loss, weight=weight, scale=None)
        else:
            self.grad_stats.measure(loss * weight / scale, scale=scale)
        self._grads_measured = True
        self._measured_grads = SeenGrads(self.layout.params[: self.layout.optimizer_spans[-1].stop])
        self.samples = samples if math.isnan(self.samples) else self.samples + samples
        if scale is None:
            return
        gate, block = self.gates[self.order.expected], self.grad_stats.block
        block.verdict[VerdictSlot.LOSS_SCALE] = scale.to(self.device, non_blocking=True)
        self._measured_scale = scale, scale._version
        if self._shadow is not None:  # the GradScaler may skip the step, and no hook would run
            if self.buffer_check is not None:
                self.buffer_check.count()
            gate.decide(block.summary, out=block.verdict, scaled=True, joint=None, commit=False)
            self._shadow.commit_or_revert(gate.memory.buffers_tainted, keep=False)

    def restart_attempt(self) -> None:
        """The loop has dropped the gradients of this attempt and begins it again."""
        if not self.stepped:  # else nothing of it was measured
            self._measured_grads, self.samples, self.attempt = SeenGrads(()), NAN, self.attempt - 1
            self._begin_attempt()

    def _begin_attempt(self) -> None:
        if self._alternating is not None and self.stepped:
            self._alternating.group_stepped(frozenset(self.stepped))
        self.stepped.clear()
        self.attempt += 1
        self._grads_measured = False
        self._totals = None
        self.grad_stats.num_microbatches = 0
        if self.buffer_check is not None:
            self.buffer_check.begin()

    # -- 3. optimizer.step()

    def before_step(self, k: int) -> None:
        """A step of optimizer `k` begins: sample the weights if it is time to."""
        self.in_step = k
        coming = self.attempt + (k in self.stepped)  # with a closure the backward of this attempt is still to come
        if self._exchange is not None:
            self._exchange.before_step(k, coming)
        unchanged: Tensor | None = None
        if self._alternating is not None and self._alternating.alternates(k):
            unchanged = self._alternating.before_step(k, check_now=self.check_weights)
        else:
            if self._sampled_attempt == coming - 1 and self._weights_measured:
                unchanged = self._update_sample.unchanged_fraction()
            early = self.check_weights and coming > self._sampled_attempt + 4
            if (early or coming % self._policy.weights_every == 0) and self._sampled_attempt != coming:
                self._update_sample.take()
                self._sampled_attempt = coming
        if unchanged is not None:
            self.grad_stats.block.summary[SummarySlot.UNCHANGED_FRACTION] = unchanged
        self.gates[k].before_step()

    def set_saving(self, saving: bool) -> None:
        """Tell all ranks, with the numbers of this attempt, whether this one is writing a checkpoint."""
        if self._exchange is not None:
            self.grad_stats.block.summary[SummarySlot.RANKS_SAVING] = float(saving)

    def decide(self, k: int) -> None:
        """Decide on the update of optimizer `k`, jointly with those that step on the same backward."""
        if k in self.stepped:
            self._begin_attempt()
        if not self._grads_measured:
            self.grad_stats.measure(None, scale=None)
            self._grads_measured = True
            self._measured_grads = SeenGrads(self.layout.params[: self.layout.optimizer_spans[-1].stop])
        if self._totals is None:
            # By the loop's own clipping, or by another backward whose loss was not watched.
            self._grads_changed = not self._measured_grads.unchanged()
            if self._grads_changed:
                self.grad_stats.recheck_grads()
            if self.buffer_check is not None:
                self.buffer_check.count()
            self._totals = self.grad_stats.block.summary
            if self._exchange is not None:
                self._totals = self._gather(self._exchange, stepping=k)
        gate, verdict, scaled = self.gates[k], self.grad_stats.block.verdict, self.loss_scale() is not None
        joint = None if self._alternating is None else self._decide_on_partners(self._alternating, k, self._totals)
        gate.decide(self._totals, out=verdict, scaled=scaled, joint=joint, commit=True)
        if joint is not None:
            self._verdicts[k].copy_(verdict)
        if not self._policy.observe:
            gate.apply(verdict, self.grad_stats.present)

    def _decide_on_partners(self, alternating: AlternatingWeights, k: int, totals: Tensor) -> Tensor | None:
        """The worst verdict on the other optimizers that step on the same backward; None where there is none."""
        others = sorted(alternating.partners[k] - {k})
        scaled = self.loss_scale() is not None
        for j in others:
            if j not in self.stepped:
                self.gates[j].decide(totals, out=self._verdicts[j], scaled=scaled, joint=None, commit=False)
        return torch.stack([self._verdicts[j, VerdictSlot.VERDICT] for j in others]).amax() if others else None

    def _gather(self, exchange: RankExchange, *, stepping: int | None) -> Tensor:
        """The totals over all ranks; `stepping` is None where the gradients were discarded without a step."""
        scale = self.loss_scale()
        values: dict[SharedSlot, float | Tensor] = {
            SharedSlot.WEIGHTS_MEASURED: self._has_weight_stats(self.order.expected if stepping is None else stepping),
            SharedSlot.INPUTS_MEASURED: self._inputs_measured,
            SharedSlot.GRADS_CHANGED: self._grads_changed and len(self.gates) == 1,
            SharedSlot.HAS_LOSS: self.grad_stats.num_microbatches > 0,
            SharedSlot.DISCARDED: stepping is None,
            SharedSlot.STALE_GRADS: self._stale_grads,
            SharedSlot.SAMPLES: self.samples,
            SharedSlot.LOSS_SCALE: NAN if scale is None else scale,
        } | self.proposals
        return exchange.gather(values, stepping=stepping)

    def _has_weight_stats(self, k: int) -> bool:
        """Whether the block holds unsent numbers of this optimizer's weights."""
        if self._alternating is not None and self._alternating.alternates(k):
            return self._alternating.block_holds(k)
        return self._weights_measured

    def after_step(self, k: int) -> None:
        """Undo what the gate did for the step, settle the buffers, send the numbers and measure the weights."""
        self.in_line_search, self.in_step = False, None
        gate = self.gates[k]
        copied, check = gate.veto_method is VetoMethod.COPY, self.buffer_check
        gate.after_step(buffers_tainted=copied and check is not None and check.any_nonfinite())
        if copied and gate.refused:
            verdict = self.grad_stats.block.verdict
            verdict[VerdictSlot.VERDICT] = verdict[VerdictSlot.VERDICT].clamp(min=float(Verdict.NONFINITE))
        if self._shadow is not None:
            self._shadow.commit_or_revert(gate.buffers_tainted)
        self.order.step(k, self.attempt)
        self._send(k)
        if self.nan_tracer.armed:
            self.nan_tracer.end_attempt(self.attempt)
        self.stepped.add(k)
        # Only the optimizer's own parameters: a loop need not zero gradients that no optimizer uses.
        self._used_grads = SeenGrads(self.layout.params[self.layout.optimizer_spans[k]])
        measured = False
        if self._alternating is not None and self._alternating.alternates(k):
            measured = self._alternating.after_step(k, self.grad_stats, list(self._model.buffers()))
        elif self._sampled_attempt == self.attempt and (change := self._update_sample.compare()) is not None:
            self.grad_stats.measure_weights(*change, list(self._model.buffers()))
            measured = self._weights_measured = True
        if self._exchange is not None:
            self._exchange.after_step(self.attempt, weights_measured=measured)

    def discard_attempt(self, *, last: bool = False) -> None:
        """An attempt ended without a step: an overflow with loss scaling, or the loop discarded the gradients.

        The ranks exchange their numbers as for a step, so that all of them judge the same. Not for the `last` attempt
        of a run: other ranks may be gone, and nothing is done about it any more.
        """
        verdict, scaled, k = self.grad_stats.block.verdict, self.loss_scale() is not None, self.order.expected
        if self.buffer_check is not None and not self.buffer_check.begun:
            self.buffer_check.count()
        self.set_saving(True)
        totals = self.grad_stats.block.summary
        if self._exchange is not None and not last:
            totals = self._gather(self._exchange, stepping=None)
        self.gates[k].decide(totals, out=verdict, scaled=scaled, joint=None, commit=False)
        if self._shadow is not None and not scaled:  # with loss scaling `backward_ended` has done this
            self._shadow.commit_or_revert(self.gates[k].memory.buffers_tainted, keep=False)
        verdict[VerdictSlot.VERDICT] = verdict[VerdictSlot.VERDICT].where(
            verdict[VerdictSlot.VERDICT] > 0, float(Verdict.DISCARDED)
        )
        if last:
            verdict[VerdictSlot.ACTIVE_RANKS] = self.grad_stats.ranks.world_size  # there was no gather
        self.order.step(None, self.attempt)
        self._send(k)
        self._begin_attempt()

    def _send(self, k: int) -> None:
        """Start the copy of this attempt's numbers to the host."""
        verdict, gate = self.grad_stats.block.verdict, self.gates[k]
        scale, (lr, momentum) = self.loss_scale(), lr_and_momentum(gate.optimizer)
        if isinstance(lr, Tensor):
            verdict[VerdictSlot.LR] = lr.detach().to(verdict.device, non_blocking=True)
        seconds, wait = self._timer.step_ended()
        context = StepContext(
            attempt=self.attempt,
            time=time.time(),
            optimizer=k,
            num_microbatches=max(self.grad_stats.num_microbatches, 1),
            watched=self.grad_stats.num_microbatches > 0,
            lr=None if isinstance(lr, Tensor) else float(lr),
            momentum=momentum,
            scaled=scale is not None,
            clips_by_norm=gate.clips_by_norm,
            has_weight_stats=self._weights_measured if self._alternating is None else self._has_weight_stats(k),
            has_input_stats=self._inputs_measured,
            grads_changed=self._grads_changed and len(self.gates) == 1,
            stale_grads=self._stale_grads,
            eval_loss=self.eval_loss,
            seconds=seconds,
            data_wait=wait,
            samples=self.samples,
            tokens=self.tokens,
            system=self._system.read(),
            judged_by=self.judged_by,
            buffers_checked=not self._policy.observe,
            iterations_before=self.order.before,
            ends_iteration=self.order.ended,
        )
        self.samples = self.tokens = self.eval_loss = self._stale_grads = NAN
        self._weights_measured = self._grads_changed = self._inputs_measured = False
        if self._alternating is not None:
            self._alternating.row_sent(k)
        self._readback.send(self.grad_stats.raw, context)

    # -- 4. two steps later

    def arrived_blocks(self, *, drain: bool = False) -> Iterator[tuple[HostBlock, StepContext]]:
        """The blocks sent two steps ago; with `drain`, waits for all that are under way."""
        for raw, context in self._readback.receive(drain=drain):
            block = HostBlock(raw, self.grad_stats.block_layout)
            if self.buffer_check is not None:
                learn_exempt_buffers(self.buffer_check, block, context)
            yield block, context

    # -- rewind and release

    def reset_after_rewind(self) -> None:
        """The run was rewound: nothing measured so far belongs to what follows."""
        self._begin_attempt()
        self._measured_grads = SeenGrads(())
        self._weights_measured = False
        if self._exchange is not None:
            self._exchange.rewound(self.attempt)
        self._update_sample.reset()
        if self._alternating is not None:
            self._alternating.reset()
        for gate in self.gates:
            gate.optimizer_state_replaced()

    def successor(self, context: GuardContext, timer: StepTimer, shadow: BufferShadow | None) -> StepPipeline:
        """A pipeline for the same optimizers, which hold other parameters now; this one is released."""
        self.release()
        new = StepPipeline(context, timer=timer, shadow=shadow)
        new.scaler, new.attempt, new.order = self.scaler, self.attempt + 1, self.order
        return new

    def release(self) -> None:
        """Put back whatever was hidden from a step."""
        self.nan_tracer.disarm()
        for gate in self.gates:
            gate.after_step()

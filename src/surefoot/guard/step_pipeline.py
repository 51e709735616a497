"""Attempts at an update, followed on the device: measured, gated, settled, and their numbers sent off.

A round begins with the first backward after a step and ends with the steps of all optimizers that use it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from surefoot.checkpoint.buffers import BufferCheck, BufferShadow
from surefoot.gate.clip import ClipOption, units_of
from surefoot.gate.gate import Gate
from surefoot.gate.rule import NormRule, VerdictSlot
from surefoot.gate.veto import VetoMethod
from surefoot.guard.iteration_order import IterationOrder
from surefoot.guard.rank_exchange import RankExchange, settings_of
from surefoot.guard.step_metrics import StepContext
from surefoot.judge.policy import Policy
from surefoot.measure.alternating import AlternatingWeights
from surefoot.measure.batch_stats import measure_inputs, numbers_in
from surefoot.measure.block_layout import SummarySlot
from surefoot.measure.grad_stats import VERDICT, GradStats, HostBlock
from surefoot.measure.layout import Layout, layout_of, local
from surefoot.measure.nan_tracer import NanTracer
from surefoot.measure.rank_agreement import SharedSlot
from surefoot.measure.readback import AsyncReadback
from surefoot.measure.stats_torch import flat_values
from surefoot.measure.system import StepTimer, SystemMonitor
from surefoot.measure.weight_stats import UpdateSample
from surefoot.records import NAN, JudgedBy, Verdict


class _Gradient:
    """The gradient a parameter has now, to be recognised later; it is not kept alive.

    A freed gradient's memory may be given to the next one, so its address would not tell them apart.
    """

    __slots__ = ("_gradient", "_version", "param")

    def __init__(self, param: Tensor, gradient: Tensor) -> None:
        self.param = param
        self._gradient = TensorWeakRef(gradient)
        self._version = gradient._version

    def unchanged(self) -> bool:
        """Whether the parameter still has this very tensor, and nobody has written to it."""
        now = self.param.grad
        return now is not None and now is self._gradient() and now._version == self._version

    def nonzero(self) -> bool:
        """Whether any of its values is; waits for the device."""
        gradient = self.param.grad
        return gradient is not None and bool(flat_values(local(gradient)).any())


class StepPipeline:
    """Everything between a backward and the numbers it leaves behind, for one set of tensors."""

    judged_by: JudgedBy = JudgedBy.LOSS
    """Which number tells the progress of the update under way."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        clip: ClipOption,
        policy: Policy,
        clock: StepTimer,
        shadow: BufferShadow | None,
    ) -> None:
        self.layout: Layout = layout_of(model, optimizers)
        self.attempt = 0
        self.scaler: Any = None
        self.samples = self.tokens = self.eval_loss = self._left_over = NAN
        """Told by the loop, or found, since the last update."""
        self.searching = False
        """An optimizer is evaluating the loss on its way; only the point it started from is judged."""
        self._model = model
        self._optimizers = optimizers
        self._policy = policy
        self._clock = clock
        self.device = _home(self.layout)
        units = units_of(clip, self.layout)
        rule = NormRule(policy.max_norm_ratio, policy.warmup, policy.norm_max_decay)
        self.meter = GradStats(
            self.layout, [u.span for u in units], self.device, buffers=len(shadow.names) if shadow else 0
        )
        self.buffers = BufferCheck(shadow, self.meter.block.buffers, self.meter.block.summary[SummarySlot.BAD_BUFFERS])
        self.gates = [
            Gate(k, o, units=units, params=self.layout.params, rule=rule, device=self.device)
            for k, o in enumerate(optimizers)
        ]
        self._shadow = shadow
        self._exchange = RankExchange(self.meter, optimizers)
        self._sample = UpdateSample(self.layout.params, self.meter.ranks.once, self.device)
        self._machine = SystemMonitor(self.device, every=policy.system_every)
        self._mailbox: AsyncReadback[StepContext] = AsyncReadback(self.meter.raw.numel(), self.device)
        self._verdicts = self.meter.block.verdict.new_zeros(len(self.gates), VERDICT)
        self._totals: Tensor | None = None
        self._measured = self._weighed = self._changed = self._fed = False
        """Gradients were measured; the summary holds unsent numbers of the weights, of gradients that the loop has
        changed after backward, of what came into the model."""
        self._updates: tuple[Tensor, int] | None = None
        """The loss scale, and its version when gradients were last measured."""
        self._sampled = -1
        """The attempt before which the weights were sampled."""
        self._had: list[_Gradient] = []
        """Some gradients as they were when they were measured."""
        self.tracer = NanTracer(model)
        self.curious = False
        """The weights are to be looked at in the next step."""
        self._used: list[_Gradient] = []
        """Some of the gradients that the last step used."""
        self._stepped: set[int] = set()
        self._turns = AlternatingWeights(self.layout, self.meter.ranks.once, self.device, every=policy.weights_every)
        self.order = IterationOrder(len(self.gates))

    @property
    def fits(self) -> bool:
        """Whether the optimizers still hold the tensors this was made for."""
        return self.layout.fits(self._optimizers)

    def scale(self) -> Tensor | None:
        """The loss scale in force, on the device."""
        return self.scaler._scale if self.scaler is not None and self.scaler.is_enabled() else None

    # -- backward

    def dropped(self) -> bool:
        """Whether gradients that were measured are gone now, without any step."""
        if not self._measured or self._stepped or self.searching:
            return False
        scale = self.scale()
        known = self._updates
        if scale is not None and (known is None or scale is not known[0] or scale._version != known[1]):
            return True  # the scaler has moved on to the next update
        if any(had.param.grad is None for had in self._had):
            return all(had.param.grad is None for had in self._had)
        touched = [g for had in self._had if (g := had.param.grad) is not None and not had.unchanged()]
        # Gradients set to zero in place, or only clipped? Asked for only here, between two backwards without a step.
        return bool(touched) and not any(bool(local(g).any()) for g in touched)

    def backward_began(self) -> bool:
        """Whether the gradients that the last step used are still there, the same tensors and unchanged.

        The device is asked for nothing, unless it is: some loops empty gradients behind torch's back. Of several
        processes each would find something else in its own part, so there the tensor alone counts.
        """
        if not self._stepped or not self._used or len(self.gates) > 1:  # several have several rounds to keep them
            return False
        used, self._used = self._used, []
        same = all(each.unchanged() for each in used)
        self._left_over = float(same and (self.meter.ranks.world > 1 or any(each.nonzero() for each in used)))
        return self._left_over > 0

    def emptied(self) -> None:
        """What was left over has been taken away."""
        self._left_over = 0.5

    def take_inputs(self, batch: Any) -> None:
        """Measure what comes into the model, of the first micro-batch of an update."""
        if self.meter.micro == 0 or self._stepped:
            values = numbers_in(batch, self.device)
            self._fed = values is not None
            if values is not None:
                measure_inputs(values, self.meter.block.summary[SummarySlot.INPUT_MEAN : SummarySlot.INPUT_TOP + 1])

    def take_progress(self, progress: Tensor | float | None) -> None:
        """Keep what the loop says is judged instead of the loss: the mean over the micro-batches of an update."""
        self.judged_by = JudgedBy.NOTHING if progress is None else JudgedBy.PROGRESS
        if progress is None:
            return
        mean = self.meter.block.summary[SummarySlot.PROGRESS]
        earlier = 0 if self._stepped else self.meter.micro
        with torch.no_grad():
            value: Any = progress
            if isinstance(progress, Tensor):
                value = progress.detach().reshape(()).to(mean, non_blocking=True)
            if earlier:
                mean += (value - mean) / (earlier + 1)
            else:
                self.meter.block.summary[SummarySlot.PROGRESS] = value

    def backward_ended(self, loss: Tensor, weight: Tensor) -> None:
        """Measure all gradients as they are now; `weight` is what backward began with, by which the loss counts."""
        if self._stepped:
            self._begin()
        scale = self.scale()
        if scale is None:
            self.meter.measure(loss, weight=weight, scale=None)
        else:
            self.meter.measure(loss * weight / scale, scale=scale)
        self._measured = True
        self._remember()
        if scale is None:
            return
        gate, block = self.gates[self.order.expected], self.meter.block
        block.verdict[VerdictSlot.SCALE] = scale.to(self.device, non_blocking=True)
        self._updates = scale, scale._version
        if self._shadow is not None:  # loss scaling may skip the step without a word to anyone
            self.buffers.count()
            gate.decide(block.summary, said=block.verdict, scaled=True, joint=None, commit=False)
            self._shadow.commit_or_revert(gate.memory.spoilt, keep=False)

    def _remember(self) -> None:
        """Some of the gradients as they are now, to tell later whether anyone has touched them."""
        self._had = _some_gradients(self.layout.params[: self.layout.scopes[-1].stop])

    def _touched(self) -> bool:
        return not all(had.unchanged() for had in self._had)

    def _begin(self) -> None:
        if self._stepped:
            self._turns.ended(frozenset(self._stepped))
        self._stepped.clear()
        self.attempt += 1
        self._measured = False
        self._totals = None
        self.meter.begin()
        self.buffers.begin()

    # -- step

    def before(self, k: int) -> None:
        """A step of this optimizer begins."""
        coming = self.attempt + (k in self._stepped)  # with a closure the backward of this attempt is still to come
        self._exchange.before(k, coming)
        if self._turns.alternates(k):
            unmoved = self._turns.before(k, curious=self.curious)
            if unmoved is not None:
                self.meter.block.summary[SummarySlot.UNMOVED] = unmoved
            self.gates[k].before()
            return
        if self._sampled == coming - 1 and self._weighed:
            unmoved = self._sample.unmoved()
            if unmoved is not None:
                self.meter.block.summary[SummarySlot.UNMOVED] = unmoved
        due = coming % self._policy.weights_every == 0 or (self.curious and coming > self._sampled + 4)
        if due and self._sampled != coming:
            self._sample.take()
            self._sampled = coming
        self.gates[k].before()

    def _has_weights(self, k: int) -> bool:
        """Whether the block holds numbers of this optimizer's weights that have not been sent."""
        return self._turns.holds(k) if self._turns.alternates(k) else self._weighed

    def tell_busy(self, busy: bool) -> None:
        """Let all processes know, with the numbers of this attempt, whether this one is at a save."""
        if self.meter.ranks.world > 1:
            self.meter.block.summary[SummarySlot.BUSY] = float(busy)

    def decide(self, k: int) -> None:
        """Decide over this optimizer's update, together with those that step on the same backward."""
        if k in self._stepped:
            self._begin()
        if not self._measured:
            self.meter.measure(None, scale=None)
            self._measured = True
            self._remember()
        if self._totals is None:
            self._changed = self._touched()  # clipped by the loop, or by another backward that nobody watched
            if self._changed:
                self.meter.look_again()
            self.buffers.count()
            self._totals = self._gather(stepping=k)
        gate, said, scaled = self.gates[k], self.meter.block.verdict, self.scale() is not None
        others = sorted(self._turns.partners[k] - {k})
        for j in others:
            if j not in self._stepped:
                self.gates[j].decide(self._totals, said=self._verdicts[j], scaled=scaled, joint=None, commit=False)
        joint = torch.stack([self._verdicts[j, VerdictSlot.VERDICT] for j in others]).amax() if others else None
        gate.decide(self._totals, said=said, scaled=scaled, joint=joint, commit=True)
        if others:
            self._verdicts[k].copy_(said)
        if not self._policy.observe:
            gate.apply(said, self.meter.present)

    def _gather(self, *, stepping: int | None) -> Tensor:
        """The numbers of all processes; None where the gradients were thrown away without a step."""
        scale = self.scale()
        known: dict[SharedSlot, float | Tensor] = {
            SharedSlot.WEIGHED: self._has_weights(self.order.expected if stepping is None else stepping),
            SharedSlot.FED: self._fed,
            SharedSlot.CHANGED: self._changed and len(self.gates) == 1,
            SharedSlot.WATCHED: self.meter.micro > 0,
            SharedSlot.DROPPED: stepping is None,
            SharedSlot.LEFT_OVER: self._left_over,
            SharedSlot.SAMPLES: self.samples,
            SharedSlot.SCALE: NAN if scale is None else scale,
        }
        return self._exchange.gather(known, stepping=stepping)

    def after(self, k: int) -> None:
        """The step is over: tidy up, settle the buffers and send the numbers off."""
        self.searching = False
        gate = self.gates[k]
        gate.after(spoilt=gate.veto_method is VetoMethod.COPY and self.buffers.any_nonfinite())
        if gate.veto_method is VetoMethod.COPY and gate.refused:
            said = self.meter.block.verdict
            said[VerdictSlot.VERDICT] = said[VerdictSlot.VERDICT].clamp(min=float(Verdict.NONFINITE))
        if self._shadow is not None:
            self._shadow.commit_or_revert(gate.buffers_tainted)
        gate.refresh()
        self.order.step(k, self.attempt)
        self._send(k)
        self.tracer.settle(self.attempt)
        self._stepped.add(k)
        # Only what the optimizer itself holds: nobody need empty gradients that no optimizer uses.
        self._used = _some_gradients(self.layout.params[self.layout.scopes[k]])
        if self._turns.alternates(k):
            looked = self._turns.after(k, self.meter, list(self._model.buffers()))
            self._exchange.after(self.attempt, looked=looked)
            return
        change = self._sample.compare() if self._sampled == self.attempt else None
        if change is not None:
            self.meter.measure_weights(*change, list(self._model.buffers()))
            self._weighed = True
        self._exchange.after(self.attempt, looked=change is not None)

    @property
    def over(self) -> bool:
        """Whether the last step has ended an iteration of the loop: no optimizer's step is missing."""
        return self.order.over

    def start_over(self) -> None:
        """The run went back: nothing measured so far belongs to what comes."""
        self._begin()
        self._had.clear()
        self._weighed = False
        self._exchange.went_back(self.attempt)
        self._sample.forget()
        self._turns.forget()
        for gate in self.gates:
            gate.forget()

    def drop(self, *, last: bool = False) -> None:
        """A round ended without a step: loss scaling found an overflow, or the loop threw it away.

        The processes exchange their numbers as for a step, so that all of them judge the same; except for the `last`
        one, at the end of a run, when others may be gone and nothing is done about it any more.
        """
        said, scaled, k = self.meter.block.verdict, self.scale() is not None, self.order.expected
        if not self.buffers.begun:
            self.buffers.count()
        self.tell_busy(True)
        totals = self.meter.block.summary if last else self._gather(stepping=None)
        self.gates[k].decide(totals, said=said, scaled=scaled, joint=None, commit=False)
        if self._shadow is not None and not scaled:  # with loss scaling that was done after backward
            self._shadow.commit_or_revert(self.gates[k].memory.spoilt, keep=False)
        said[VerdictSlot.VERDICT] = said[VerdictSlot.VERDICT].where(
            said[VerdictSlot.VERDICT] > 0, float(Verdict.DISCARDED)
        )
        if last:
            said[VerdictSlot.ALIVE] = self.meter.ranks.world  # nobody was asked
        self.order.step(None, self.attempt)
        self._send(k)
        self._begin()

    def _send(self, k: int) -> None:
        said, gate = self.meter.block.verdict, self.gates[k]
        scale, (lr, momentum) = self.scale(), settings_of(gate.optimizer)
        if isinstance(lr, Tensor):
            said[VerdictSlot.LR] = lr.detach().to(said.device, non_blocking=True)
        seconds, wait = self._clock.step_ended()
        tag = StepContext(
            attempt=self.attempt,
            time=time.time(),
            optimizer=k,
            micros=max(self.meter.micro, 1),
            watched=self.meter.micro > 0,
            lr=None if isinstance(lr, Tensor) else float(lr),
            momentum=momentum,
            scaled=scale is not None,
            clips=gate.by_norm,
            weights=self._has_weights(k),
            fed=self._fed,
            changed=self._changed and len(self.gates) == 1,
            left_over=self._left_over,
            eval_loss=self.eval_loss,
            seconds=seconds,
            data_wait=wait,
            samples=self.samples,
            tokens=self.tokens,
            reading=self._machine.read(),
            judged_by=self.judged_by,
            buffers=self._shadow is not None,
            completed=self.order.before,
            ends=self.order.over,
        )
        self.samples = self.tokens = self.eval_loss = self._left_over = NAN
        self._weighed = self._changed = self._fed = False
        self._turns.sent(k)
        self._mailbox.send(self.meter.raw, tag)

    # -- two steps later

    def arrived(self, *, rest: bool = False) -> Iterator[tuple[HostBlock, StepContext]]:
        """The blocks sent two steps ago, or all that are still under way."""
        raw: np.ndarray
        for raw, tag in self._mailbox.rest() if rest else self._mailbox.due():
            block = self.meter.unpack(raw)
            if self.buffers.names:
                self._follow_buffers(block, tag)
            yield block, tag

    def _follow_buffers(self, block: HostBlock, tag: StepContext) -> None:
        verdict, norm, nonfinite = (
            block.verdict[place] for place in (VerdictSlot.VERDICT, VerdictSlot.NORM, VerdictSlot.NONFINITE)
        )
        bad = np.flatnonzero(block.buffers).tolist() if block.head[SummarySlot.BAD_BUFFERS] > 0 else []
        alone = math.isfinite(block.verdict[VerdictSlot.LOSS]) and math.isfinite(norm) and nonfinite == 0
        self.buffers.learn_exempt(tag.attempt, bad, alone=alone, applied=verdict == Verdict.APPLIED)

    def release(self) -> None:
        """Put back whatever a step was not to see."""
        self.tracer.disarm()
        for gate in self.gates:
            gate.after()


def _some_gradients(params: Sequence[Tensor]) -> list[_Gradient]:
    return list(itertools.islice((_Gradient(p, p.grad) for p in params if p.grad is not None), 8))


def _home(layout: Layout) -> torch.device:
    """The device the numbers live on: the first accelerator that holds a parameter, else the CPU."""
    devices = [local(p).device for p in layout.params]
    return next((d for d in devices if d.type != "cpu"), devices[0])

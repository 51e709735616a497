"""Attempts at an update, followed on the device: measured, gated, settled, and their numbers sent off.

A round begins with the first backward after a step and ends with the steps of all optimizers that use it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.gate.clip import ClipOption, units_of
from surefoot.gate.decide import Rule, Said
from surefoot.gate.gate import Gate
from surefoot.gate.ways import Way
from surefoot.judge.policy import Policy
from surefoot.measure.inputs import measure_inputs, numbers_in
from surefoot.measure.layout import Layout, layout_of, local
from surefoot.measure.mailbox import Mailbox
from surefoot.measure.meter import Arrived, Meter
from surefoot.measure.origin import Tracer
from surefoot.measure.resources import Clock, Machine
from surefoot.measure.summary import Head
from surefoot.measure.weights import UpdateSample
from surefoot.records import NAN, Verdict
from surefoot.rows import Tag
from surefoot.state.buffers import BufferShadow


class Rounds:
    """Everything between a backward and the numbers it leaves behind, for one set of tensors."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        clip: ClipOption,
        policy: Policy,
        clock: Clock,
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
        rule = Rule(policy.outlandish, policy.warmup, policy.fade)
        self.meter = Meter(self.layout, [u.span for u in units], self.device)
        self.gates = [
            Gate(k, o, units=units, params=self.layout.params, rule=rule, device=self.device)
            for k, o in enumerate(optimizers)
        ]
        self._shadow = shadow
        self._sample = UpdateSample(self.layout.params, self.meter.ranks.once, self.device)
        self._machine = Machine(self.device, every=policy.machine_every)
        self._mailbox: Mailbox[Tag] = Mailbox(self.meter.raw.numel(), self.device)
        said = self.meter.block.verdict
        self._verdicts = said.new_zeros(len(self.gates), said.numel())
        self._totals: Tensor | None = None
        self._measured = False
        self._weighed = self._changed = self._fed = False
        """The summary holds numbers that have not been sent: of the weights, of gradients that the loop has changed
        after backward, of what came into the model."""
        self._updates = -1
        """How often the loss scale had been updated when gradients were last measured."""
        self._sampled = -1
        """The attempt before which the weights were sampled."""
        self._had: list[tuple[Tensor, int]] = []
        """Some parameters that had gradients when they were measured, with the version of those."""
        self.tracer = Tracer(model)
        self.curious = False
        """The weights are to be looked at in the next step."""
        self._used: tuple[Tensor, int, int] | None = None
        """One parameter; where the gradient lay that it had in the last step, and the version of that."""
        self._stepped: set[int] = set()
        self._cohort = frozenset(range(len(self.gates)))
        """The optimizers that stepped in the round before: they stand or fall together."""

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
        if scale is not None and scale._version != self._updates:
            return True  # the scaler has moved on to the next update
        if any(p.grad is None for p, _ in self._had):
            return all(p.grad is None for p, _ in self._had)
        touched = [g for p, version in self._had if (g := p.grad) is not None and g._version != version]
        # Gradients set to zero in place, or only clipped? Asked for only here, between two backwards without a step.
        return bool(touched) and not any(bool(local(g).any()) for g in touched)

    def backward_began(self) -> bool:
        """Whether nobody has emptied the gradients since the last step; this asks the device for nothing."""
        if not self._stepped or self._used is None or len(self.gates) > 1:  # several have several rounds to keep them
            return False
        param, place, version = self._used
        self._used = None
        now = _dense(param)
        if now is None:
            self._left_over = 0.0
        elif now.data_ptr() == place:
            self._left_over = float(now._version == version)  # nobody has written to it since
        else:
            self._left_over = float(bool(now.any()))  # somebody has put another one there, which is worth a wait
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
                measure_inputs(values, self.meter.block.summary[Head.INPUT_MEAN : Head.INPUT_TOP + 1])

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
        gate, block = self.gates[0], self.meter.block
        block.verdict[Said.SCALE] = scale.to(self.device, non_blocking=True)
        self._updates = scale._version
        if self._shadow is not None:  # loss scaling may skip the step without a word to anyone
            gate.decide(block.summary, said=block.verdict, scaled=True, joint=None, commit=False)
            self._shadow.settle(gate.memory.spoilt, keep=False)

    def _remember(self) -> None:
        """Some of the gradients as they are now, to tell later whether anyone has touched them."""
        found = ((p, g._version) for p in self.layout.params if (g := p.grad) is not None)
        self._had = list(itertools.islice(found, 8))

    def _touched(self) -> bool:
        return any(p.grad is None or p.grad._version != version for p, version in self._had)

    def _begin(self) -> None:
        if self._stepped:
            self._cohort = frozenset(self._stepped)
        self._stepped.clear()
        self.attempt += 1
        self._measured = False
        self._totals = None
        self.meter.begin()

    # -- step

    def before(self, k: int) -> None:
        """A step of this optimizer begins."""
        coming = self.attempt + (k in self._stepped)  # with a closure the backward of this attempt is still to come
        if self._sampled == coming - 1 and self._weighed:
            unmoved = self._sample.unmoved()
            if unmoved is not None:
                self.meter.block.summary[Head.UNMOVED] = unmoved
        due = coming % self._policy.weights_every == 0 or (self.curious and coming > self._sampled + 4)
        if due and self._sampled != coming:
            self._sample.take()
            self._sampled = coming
        self.gates[k].before()

    def tell_busy(self, busy: bool) -> None:
        """Let all processes know, with the numbers of this attempt, whether this one is at a save."""
        if self.meter.ranks.world > 1:
            self.meter.block.summary[Head.BUSY] = float(busy)

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
            self._totals = self.meter.totals()
        gate, said, scaled = self.gates[k], self.meter.block.verdict, self.scale() is not None
        others = sorted(self._cohort - {k}) if k in self._cohort else []
        for j in others:
            if j not in self._stepped:
                self.gates[j].decide(self._totals, said=self._verdicts[j], scaled=scaled, joint=None, commit=False)
        joint = torch.stack([self._verdicts[j, Said.VERDICT] for j in others]).amax() if others else None
        gate.decide(self._totals, said=said, scaled=scaled, joint=joint, commit=True)
        if others:
            self._verdicts[k].copy_(said)
        if not self._policy.observe:
            gate.apply(said, self.meter.present)

    def after(self, k: int) -> None:
        """The step is over: tidy up, settle the buffers and send the numbers off."""
        self.searching = False
        gate = self.gates[k]
        gate.after()
        if gate.way is Way.COPY and gate.refused:
            said = self.meter.block.verdict
            said[Said.VERDICT] = said[Said.VERDICT].clamp(min=float(Verdict.NONFINITE))
        if self._shadow is not None:
            self._shadow.settle(gate.spoilt)
        gate.refresh()
        self._send(k)
        self.tracer.settle(self.attempt)
        self._stepped.add(k)
        self._used = next(((p, g.data_ptr(), g._version) for p, _ in self._had if (g := _dense(p)) is not None), None)
        change = self._sample.compare() if self._sampled == self.attempt else None
        if change is not None:
            self.meter.measure_weights(*change, list(self._model.buffers()))
            self._weighed = True

    @property
    def over(self) -> bool:
        """Whether all optimizers that use this round's gradients have stepped, as far as the round before tells."""
        return self._stepped >= self._cohort or self._stepped.isdisjoint(self._cohort)

    def start_over(self) -> None:
        """The run went back: nothing measured so far belongs to what comes."""
        self._begin()
        self._had.clear()
        self._weighed = False
        self._sample.forget()
        for gate in self.gates:
            gate.forget()

    def drop(self) -> None:
        """A round ended without a step: loss scaling found an overflow, or the loop threw it away."""
        said, scaled = self.meter.block.verdict, self.scale() is not None
        self.gates[0].decide(self.meter.block.summary, said=said, scaled=scaled, joint=None, commit=False)
        said[Said.VERDICT] = said[Said.VERDICT].where(said[Said.VERDICT] > 0, float(Verdict.DROPPED))
        said[Said.ALIVE] = self.meter.ranks.world  # nobody was asked
        self.tell_busy(True)
        self._send(0)
        self._begin()

    def _send(self, k: int) -> None:
        said, gate = self.meter.block.verdict, self.gates[k]
        scale, lr = self.scale(), gate.optimizer.param_groups[0].get("lr", NAN)
        if isinstance(lr, Tensor):
            said[Said.LR] = lr.detach().to(said.device, non_blocking=True)
        seconds, wait = self._clock.step_ended()
        tag = Tag(
            attempt=self.attempt,
            time=time.time(),
            optimizer=k,
            micros=max(self.meter.micro, 1),
            watched=self.meter.micro > 0,
            lr=None if isinstance(lr, Tensor) else float(lr),
            momentum=_momentum(gate.optimizer),
            scaled=scale is not None,
            clips=gate.by_norm,
            weights=self._weighed,
            fed=self._fed,
            changed=self._changed and len(self.gates) == 1,
            left_over=self._left_over,
            eval_loss=self.eval_loss,
            seconds=seconds,
            data_wait=wait,
            samples=self.samples,
            tokens=self.tokens,
            reading=self._machine.read(),
        )
        self.samples = self.tokens = self.eval_loss = self._left_over = NAN
        self._weighed = self._changed = self._fed = False
        self._mailbox.send(self.meter.raw, tag)

    # -- two steps later

    def arrived(self, *, rest: bool = False) -> Iterator[tuple[Arrived, Tag]]:
        """The blocks sent two steps ago, or all that are still under way."""
        raw: np.ndarray
        for raw, tag in self._mailbox.rest() if rest else self._mailbox.due():
            yield self.meter.unpack(raw), tag

    def release(self) -> None:
        """Put back whatever a step was not to see."""
        self.tracer.disarm()
        for gate in self.gates:
            gate.after()


def _dense(param: Tensor) -> Tensor | None:
    """This process's part of a parameter's gradient, unless it has none or a sparse one."""
    gradient = None if param.grad is None else local(param.grad)
    return gradient if gradient is not None and gradient.layout is torch.strided else None


def _momentum(optimizer: Optimizer) -> float:
    """Momentum or the first beta of the first group, where the host knows it."""
    group = optimizer.param_groups[0]
    held = group["betas"][0] if "betas" in group else group.get("momentum", NAN)
    return NAN if isinstance(held, Tensor) else float(held)


def _home(layout: Layout) -> torch.device:
    """The device the numbers live on: the first accelerator that holds a parameter, else the CPU."""
    devices = [local(p).device for p in layout.params]
    return next((d for d in devices if d.type != "cpu"), devices[0])

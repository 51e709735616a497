"""`attach`: the rooms wired to one model and its optimizers. It holds no rule of its own; read it top to bottom.

A step, seen from here:

    watch            the loss is remembered, and its backward will tell when it ends
    backward ends    all gradients are measured in one pass            -> Meter
    before the step  the gate decides and clips or refuses             -> Gate
    after the step   buffers settle, the numbers are sent off          -> BufferShadow, Mailbox
                     the numbers of two steps ago are read and judged  -> Judge, Journal
                     and what was decided is done                      -> act
"""

from __future__ import annotations

import functools
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Never, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot import edge
from surefoot.act.stop import Stop, TrainingStopped
from surefoot.gate.clip import ClipOption, units_of
from surefoot.gate.decide import Rule, Said
from surefoot.gate.gate import Gate
from surefoot.gate.ways import Way, on_accelerator
from surefoot.journal.writer import Journal
from surefoot.judge.history import History
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.measure.environment import describe
from surefoot.measure.layout import Layout, layout_of, local
from surefoot.measure.mailbox import Mailbox
from surefoot.measure.meter import Meter
from surefoot.measure.resources import Clock, Machine, samples_in
from surefoot.measure.weights import UpdateSample
from surefoot.records import NAN, Decision, Event, Note, Row, Verdict
from surefoot.rows import Tag, row_from, worst_tensors
from surefoot.state.buffers import BufferShadow

log = logging.getLogger("surefoot")
P = ParamSpec("P")
R = TypeVar("R")


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    run_dir: str | os.PathLike[str] | None = None,
    clip: ClipOption = None,
    policy: str | Policy = "protect",
    scaler: Any = None,
    **unknown: Never,
) -> Guard:
    """Watch a model's training and refuse bad updates; hand the loss through `guard.watch` and train as before.

    `clip` is None, a number (global norm), "adaptive", {"value": x}, or a list with one of these for each parameter
    group. `policy` is "protect", "observe" (touches nothing, tells what it would have done) or a `surefoot.Policy`.
    `scaler` is the GradScaler in use, if any. With SUREFOOT=off in the environment nothing happens at all.
    """
    if os.environ.get("SUREFOOT", "").lower() in ("off", "0", "false"):
        return OffGuard()
    edge.check_options(unknown)
    model = edge.check_model(model)
    return LiveGuard(
        model,
        edge.check_optimizers(optimizer, model),
        run_dir=edge.check_run_dir(run_dir),
        clip=clip,
        policy=edge.check_policy(policy),
        scaler=scaler,
    )


class Guard(ABC):
    """What `attach` returns; also a context manager that closes itself."""

    step: int
    """Updates known to have landed; two steps behind, because that is when the numbers are read."""

    @abstractmethod
    def watch(self, loss: Tensor, batch: Any = None) -> Tensor:
        """Hand the loss through, unchanged, so that its backward is seen; `batch` tells the number of samples."""

    @abstractmethod
    def report(self, **values: float) -> None:
        """Tell the journal a value of your own; `tokens`, `samples` and `total_steps` also feed speed and time left."""

    @abstractmethod
    def close(self) -> None:
        """Read the last numbers, write everything down and let go of the model; may be called again."""

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()


class OffGuard(Guard):
    """The guard that does nothing, for SUREFOOT=off."""

    def __init__(self) -> None:
        self.step = 0

    def watch(self, loss: Tensor, batch: Any = None) -> Tensor:
        return loss

    def report(self, **values: float) -> None:
        pass

    def close(self) -> None:
        pass


def contained(
    method: Callable[Concatenate[LiveGuard, P], R],
) -> Callable[Concatenate[LiveGuard, P], R | None]:
    """An error inside the guard ends the protection, loudly, and never the training."""

    @functools.wraps(method)
    def wrapper(self: LiveGuard, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self._lost:
            return None
        try:
            return method(self, *args, **kwargs)
        except (TrainingStopped, edge.Misuse):
            raise
        except Exception as error:
            self._lose(error, method.__name__)
            return None

    return wrapper


class LiveGuard(Guard):
    """Follows one model and its optimizers step by step."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        run_dir: str | os.PathLike[str],
        clip: ClipOption,
        policy: Policy,
        scaler: Any,
    ) -> None:
        self.policy = policy
        self.step = 0
        self.history = History()
        """The last 100 losses and gradient norms."""
        self._model = model
        self._optimizers = optimizers
        self._clip = clip
        self._scaler = scaler
        self._judge = Judge(policy)
        self._clock = Clock()
        self._lost = False
        self._watched = False
        self._reported: dict[str, float] = {}
        self._total = NAN
        self._landed = -1
        self._wire()
        self._attempt = 0
        self._journal = Journal(run_dir, rank=self._meter.ranks.rank, info=self._info(), on_failure=_tell_failure)
        self._attempt = self._journal.last_attempt + 1
        self._journal.layout(self._layout.names, self._layout.numels)
        self._note("attached", "; ".join(g.why for g in self._gates))
        for gate in self._gates:
            if gate.way is Way.HOST and on_accelerator(self._layout.params):
                log.info("surefoot: %s", gate.why)
        self._hooks: list[Any] = [self._clock_hook(model)]
        for k, o in enumerate(optimizers):
            self._hooks.append(o.register_step_pre_hook(torch.compiler.disable(functools.partial(self._before_step, k))))
            self._hooks.append(o.register_step_post_hook(torch.compiler.disable(functools.partial(self._after_step, k))))

    # -- set-up ------------------------------------------------------------------------------------------------------

    def _wire(self) -> None:
        """Everything that depends on which tensors the optimizers hold."""
        self._layout: Layout = layout_of(self._model, self._optimizers)
        device = _home(self._layout)
        units = units_of(self._clip, self._layout)
        rule = Rule(self.policy.outlandish, self.policy.warmup, self.policy.fade)
        self._meter = Meter(self._layout, [u.span for u in units], device)
        self._gates = [
            Gate(k, o, units=units, params=self._layout.params, rule=rule, device=device)
            for k, o in enumerate(self._optimizers)
        ]
        self._shadow = BufferShadow(self._model) if not self.policy.observe else None
        self._sample = UpdateSample(self._layout.params, self._meter.ranks.once, device)
        self._mailbox: Mailbox[Tag] = Mailbox(self._meter.raw.numel(), device)
        self._machine = Machine(device)
        self._verdicts = torch.zeros(len(self._gates), self._meter.block.verdict.numel(), device=device).to(
            self._meter.block.verdict.dtype
        )
        self._totals: Tensor | None = None
        self._measured = False
        self._searching = False
        self._stepped: set[int] = set()
        self._cohort = frozenset(range(len(self._gates)))

    def _info(self) -> dict[str, Any]:
        return {
            "config": {
                "policy": {name: getattr(self.policy, name) for name in self.policy.__slots__},
                "clip": self._clip,
                "model": type(self._model).__name__,
                "parameters": sum(self._layout.numels),
                "tensors": len(self._layout.names),
                "optimizers": [
                    {
                        "class": type(g.optimizer).__name__,
                        "way": g.way,
                        "groups": [{k: v for k, v in group.items() if k != "params"} for group in g.optimizer.param_groups],
                    }
                    for g in self._gates
                ],
                "processes": self._meter.ranks.world,
            },
            "data": None,
        } | describe(self._meter.device)

    def _clock_hook(self, model: nn.Module) -> Any:
        clock = self._clock

        def before_forward(*_: object) -> None:
            if not torch.compiler.is_compiling():  # a compiler that traces this finds nothing to do
                clock.forward_began()

        return model.register_forward_pre_hook(before_forward)

    # -- backward ----------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def watch(self, loss: Tensor, batch: Any = None) -> Tensor:
        edge.check_loss(loss)
        if self._lost:
            return loss
        first, self._watched = not self._watched, True
        value, samples = loss.detach(), samples_in(batch)
        queue = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore[reportAttributeAccessIssue]

        def backward_began(gradient: Tensor) -> None:
            if first:
                self._look_for_scaler(gradient)
            self._backward_begins()
            # Others queue work for the end of backward too, such as the exchange of gradients: queued once more from
            # there, ours comes after theirs.
            queue(lambda: queue(lambda: self._backward_ended(value, samples)))

        loss.register_hook(backward_began)
        return loss

    @contained
    def _look_for_scaler(self, gradient: Tensor) -> None:
        if self._scaler is None:
            self._scaler = edge.find_scaler(float(gradient))  # one look, before the first step
            if self._scaler is not None:
                self._note("scaler", "a GradScaler was found at work; pass it as scaler= to be sure it is the right one")

    @contained
    def _backward_begins(self) -> None:
        """Gradients measured before and gone now were thrown away without a step."""
        had = [p for p, here in zip(self._layout.params, self._meter.present, strict=False) if here][:8]
        if self._measured and not self._stepped and not self._searching and had and all(p.grad is None for p in had):
            self._send_dropped()

    @contained
    def _backward_ended(self, loss: Tensor, samples: float) -> None:
        if self._searching:
            return  # the gate has passed the point this step starts from; where it looks on its way is its own affair
        self._open()
        scale = self._scale()
        self._meter.measure(loss, scale=scale)
        self._measured = True
        if scale is not None and self._shadow is not None:  # loss scaling may skip the step without a word to anyone
            gate = self._gates[0]
            gate.decide(
                self._meter.block.summary, said=self._meter.block.verdict, scaled=True, joint=None, commit=False
            )
            self._shadow.settle(gate.memory.spoilt, keep=False)
        self._reported["samples"] = self._reported.get("samples", 0.0) + samples

    def _open(self) -> None:
        """A new attempt begins with the first backward after a step."""
        if self._stepped:
            self._cohort = frozenset(self._stepped)
            self._close_attempt()
        if not self._layout.fits(self._optimizers):
            self._rewire()

    def _close_attempt(self) -> None:
        self._stepped.clear()
        self._attempt += 1
        self._measured = False
        self._totals = None
        self._meter.begin()

    def _rewire(self) -> None:
        """The optimizers hold other parameters than before: start over with those."""
        self._read(self._mailbox.rest())
        self._wire()
        self._journal.layout(self._layout.names, self._layout.numels)
        self._note("rewired", "the optimizers' parameter groups have changed; baselines start over")

    def _scale(self) -> Tensor | None:
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        return self._scaler._scale

    # -- step --------------------------------------------------------------------------------------------------------

    @contained
    def _before_step(self, k: int, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._watched and not _has_closure(args, kwargs):
            raise edge.Misuse(edge.NEVER_WATCHED)
        if self._attempt % self.policy.weights_every == 0:
            self._sample.take()
        self._gates[k].before()
        if not _has_closure(args, kwargs):
            self._pass_gate(k)
            return None
        return _with_closure(args, kwargs, functools.partial(self._closure, k, first=[True]))

    def _closure(self, k: int, closure: Callable[[], Any], *, first: list[bool]) -> Any:
        """The user's closure, and the gate after it: its backward runs inside the step."""
        if not first[0]:
            self._searching = True
            loss = closure()
            if self._gates[k].refused and not self.policy.observe:
                self._gates[k].hide()
            return loss
        with torch.enable_grad():
            loss = closure()
        if not self._watched:
            raise edge.Misuse(edge.NEVER_WATCHED)
        self._pass_gate_contained(k)
        first[0] = self._gates[k].way is not Way.COPY
        return loss

    @contained
    def _pass_gate_contained(self, k: int) -> None:
        self._pass_gate(k)

    def _pass_gate(self, k: int) -> None:
        """Decide over this optimizer's update together with those that step on the same backward."""
        if k in self._stepped:
            self._cohort = frozenset(self._stepped)
            self._close_attempt()
        if not self._measured:
            self._open()
            self._meter.measure(None, scale=None)
            self._measured = True
        if self._totals is None:
            self._totals = self._meter.totals()
        scaled = self._scale() is not None
        others = [j for j in self._cohort if j != k] if k in self._cohort else []
        for j in others:
            if j not in self._stepped:
                self._gates[j].decide(self._totals, said=self._verdicts[j], scaled=scaled, joint=None, commit=False)
        joint = torch.stack([self._verdicts[j, Said.VERDICT] for j in others]).amax() if others else None
        said = self._meter.block.verdict
        self._gates[k].decide(self._totals, said=said, scaled=scaled, joint=joint, commit=True)
        if others:
            self._verdicts[k].copy_(said)
        if not self.policy.observe:
            self._gates[k].apply(said, self._meter.present)

    @contained
    def _after_step(self, k: int, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gate = self._gates[k]
        self._searching = False
        gate.after()
        if gate.refused and gate.way is Way.COPY:
            self._meter.block.verdict[Said.VERDICT] = self._meter.block.verdict[Said.VERDICT].clamp(min=1.0)
            gate.memory.spoilt.fill_(1.0)
        if self._shadow is not None:
            self._shadow.settle(gate.memory.spoilt if gate.refused is None else bool(gate.memory.spoilt))
        if self._attempt % 10 == 0:
            gate.memory.refresh()
        fresh = self._attempt > 0 and (self._attempt - 1) % self.policy.weights_every == 0
        self._send(k, weights=fresh)
        self._stepped.add(k)
        change = self._sample.compare()
        if change is not None:
            buffers = self._shadow.tensors if self._shadow is not None else list(self._model.buffers())
            self._meter.measure_weights(*change, buffers)
        self._read(self._mailbox.due())

    def _send(self, k: int, *, weights: bool) -> None:
        said, gate = self._meter.block.verdict, self._gates[k]
        scale, lr = self._scale(), gate.optimizer.param_groups[0]["lr"]
        if scale is not None:
            said[Said.SCALE] = scale.to(said.device, non_blocking=True)
        if isinstance(lr, Tensor):
            said[Said.LR] = lr.detach().to(said.device, non_blocking=True)
        seconds, wait = self._clock.step_ended()
        tag = Tag(
            attempt=self._attempt,
            time=time.time(),
            optimizer=k,
            micros=max(self._meter.micro, 1),
            watched=self._meter.micro > 0,
            lr=None if isinstance(lr, Tensor) else float(lr),
            scaled=scale is not None,
            clips=any(g.clip.by_norm for g in gate.units),
            weights=weights,
            seconds=seconds,
            data_wait=wait,
            samples=self._reported.pop("samples", NAN),
            tokens=self._reported.pop("tokens", NAN),
            reading=self._machine.read(),
        )
        self._mailbox.send(self._meter.raw, tag)

    def _send_dropped(self) -> None:
        """An attempt that ended without a step: loss scaling found an overflow, or the loop threw it away."""
        said, scaled = self._meter.block.verdict, self._scale() is not None
        gate = self._gates[0]
        gate.decide(self._meter.block.summary, said=said, scaled=scaled, joint=None, commit=False)
        said[Said.VERDICT] = said[Said.VERDICT].where(said[Said.VERDICT] > 0, float(Verdict.DROPPED))
        self._send(0, weights=False)
        self._close_attempt()
        self._read(self._mailbox.due())

    # -- two steps later ---------------------------------------------------------------------------------------------

    def _read(self, arrived: Any) -> None:
        for raw, tag in arrived:
            self._judge_row(raw, tag)

    def _judge_row(self, raw: np.ndarray, tag: Tag) -> None:
        block = self._meter.unpack(raw)
        again = tag.attempt == self._landed  # another optimizer's part of an update that has landed already
        row = row_from(block, tag, step=self.step - again, history=self.history, left=self._time_left())
        layers = block.stats.numpy()
        self._journal.row(row, layers)
        if row.landed and not again:
            self.step += 1
            self._landed = tag.attempt
        for event in self._judge.update(row):
            self._journal.event(event)
            if isinstance(event, Decision):
                self._carry_out(event, row, layers)

    def _carry_out(self, decision: Decision, row: Row, layers: np.ndarray) -> None:
        if decision.action == "refuse":
            tensors = worst_tensors(self._layout.names, layers, row)
            if tensors:
                self._note("tensors", "where the bad gradients were", at=row, tensors=tensors)
            done = "refused" if decision.applied else "would have been refused"
            if self._meter.ranks.rank == 0:
                log.warning("surefoot: update %d (attempt %d) %s: %s", row.step, row.attempt, done, decision.reason)
        elif decision.action == "stop" and decision.applied:
            self._journal.flush()
            Stop(decision.reason).apply()

    def _time_left(self) -> float:
        return self._clock.left(self._total - self.step)

    # -- the user's words, and the end -------------------------------------------------------------------------------

    @contained
    def report(self, **values: float) -> None:
        for name in ("tokens", "samples"):
            if name in values:
                self._reported[name] = self._reported.get(name, 0.0) + float(values[name])
        self._total = float(values.get("total_steps", self._total))
        rest = {k: v for k, v in values.items() if k not in ("tokens", "samples")}
        if rest:
            self._note("report", **rest)

    def close(self) -> None:
        self._finish()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._shadow is not None:
            self._shadow.close()
        self._lost = True
        self._journal.close()

    @contained
    def _finish(self) -> None:
        try:
            self._read(self._mailbox.rest())
        except TrainingStopped:
            pass  # the run is over anyway, and the journal holds the reason
        self._note("closed")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._lost:
            self._note("exception", f"{type(error).__name__}: {error}")
        self.close()

    def _note(self, name: str, detail: str = "", *, at: Row | None = None, **values: Any) -> None:
        step, attempt = (self.step, self._attempt) if at is None else (at.step, at.attempt)
        self._event(Note(step=step, attempt=attempt, rank=self._meter.ranks.rank, name=name, detail=detail, values=values))

    def _event(self, event: Event) -> None:
        self._journal.event(event)

    def _lose(self, error: Exception, where: str) -> None:
        """Something in here broke: say so, put everything back and let the training go on without protection."""
        self._lost = True
        log.error(
            "surefoot: protection is OFF for the rest of this run, training goes on: %s in %s. This is a fault in "
            "surefoot; please report it with the traceback below.",
            error,
            where,
            exc_info=error,
        )
        for gate in self._gates:
            gate.after()
        self._note("degraded", f"{type(error).__name__} in {where}: {error}")
        if self._meter.ranks.world > 1:
            self._hooks.append(self._optimizers[0].register_step_pre_hook(lambda *_: self._meter.stand_in()))


def _home(layout: Layout) -> torch.device:
    """The device the numbers live on: the first accelerator that holds a parameter, else the CPU."""
    devices = [local(p).device for p in layout.params]
    return next((d for d in devices if d.type != "cpu"), devices[0])


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return callable(kwargs.get("closure")) or (len(args) > 1 and callable(args[1]))


def _with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[..., Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": functools.partial(wrap, kwargs["closure"])}
    return (args[0], functools.partial(wrap, args[1]), *args[2:]), kwargs


def _tell_failure(reason: str) -> None:
    log.error("surefoot: the journal has stopped, training and protection go on: %s", reason)

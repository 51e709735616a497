"""The guard at work: hooks on one model and its optimizers, which call the rooms in their order."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.checkpoint.buffers import EXEMPT_AFTER, BufferShadow
from surefoot.checkpoint.tree import Stateful
from surefoot.gate.clip import ClipOption
from surefoot.gate.skip_step import SkippableStep, StepRefused
from surefoot.gate.veto import VetoMethod
from surefoot.guard import validate
from surefoot.guard.batches import Batches, FetchesThrough, Through
from surefoot.guard.guard import LOSS, Guard, Progress
from surefoot.guard.hooks import EndTiming, Timing, called_by_loop, close_if_alive, contained, uncompiled
from surefoot.guard.open_run import open_checkpointer, open_metrics_reader
from surefoot.guard.recovery import Recovery
from surefoot.guard.run_info import config_of, judge_for
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.judge.policy import Policy
from surefoot.measure.system import StepTimer, samples_in
from surefoot.records import Action, Event, JudgedBy, StepMetrics, Verdict

if TYPE_CHECKING:
    from surefoot.guard.checkpointer import Checkpointer

log = logging.getLogger("surefoot")
T = TypeVar("T")
GUARDED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have a guard already."""


class AttachedGuard(Guard):
    """Follows one model and its optimizers step by step."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        run_dir: str | os.PathLike[str],
        clip: ClipOption,
        policy: Policy,
        scheduler: Sequence[Stateful],
        scaler: Any,
        extra: Mapping[str, Any],
        ring: int | None,
        loader: Any,
        resume: bool,
        step_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        steps_of: int | None = None,
    ) -> None:
        self.lost = False
        """Protection has ended: closed, or given up after an error of its own."""
        self._optimizers = optimizers
        self._watched = False
        self._awaits_backward = False
        """A loss was watched, and no backward has begun from it yet."""
        self._without_backward = 0
        """Steps in a row that were made although no backward ran from the watched loss."""
        self._thread = threading.get_ident()
        """The thread that trains."""
        self._clock = StepTimer()
        self._shadow = None if policy.observe else BufferShadow(model)
        self._build = functools.partial(
            StepPipeline, model, optimizers, clip=clip, policy=policy, clock=self._clock, shadow=self._shadow
        )
        try:
            self._rounds = self._build()
            self._rounds.scaler = scaler
            judge = judge_for(model, policy, self._rounds)
            self._desk = open_metrics_reader(
                self._rounds,
                optimizers[0],
                judge,
                run_dir=run_dir,
                info=config_of(model, clip, policy, self._rounds),
                policy=policy,
                clock=self._clock,
                steps_of=steps_of,
            )
            self._footing = Recovery(
                model,
                optimizers,
                rounds=self._rounds,
                desk=self._desk,
                policy=policy,
                shadow=self._shadow,
                scheduler=scheduler,
                extra=extra,
                ring=ring,
            )
            self._rounds.attempt = self._desk.journal.last_attempt + 1
            self._anchor: Checkpointer | None = None
            if resume:
                self._anchor = open_checkpointer(
                    model,
                    optimizers,
                    run_dir=Path(run_dir),
                    rounds=self._rounds,
                    desk=self._desk,
                    footing=self._footing,
                    policy=policy,
                    scheduler=scheduler,
                    extra=extra,
                    loader=loader,
                    shadow=self._shadow,
                    step_fn=step_fn,
                )
        except BaseException:
            self._release_shadow()
            raise
        parts = called_by_loop(model)
        self._hooks: list[Any] = [m.register_forward_pre_hook(Timing(self), prepend=True) for m in parts]
        if self._anchor is not None:
            self._hooks += [m.register_forward_hook(EndTiming(self)) for m in parts]
        for k, o in enumerate(optimizers):
            self._hooks.append(o.register_step_pre_hook(uncompiled(functools.partial(self._before_step, k))))
            self._hooks.append(o.register_step_post_hook(uncompiled(functools.partial(self._after_step, k))))
            GUARDED.add(o)
        if self._anchor is not None and isinstance(loader, FetchesThrough):
            loader.through = Through(self)
        self._steps = [SkippableStep(o, functools.partial(self._refused, k)) for k, o in enumerate(optimizers)]
        self._at_exit = functools.partial(close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def step(self) -> int:
        return self._desk.step

    @property
    def history(self) -> tuple[list[float], list[float]]:
        return list(self._desk.history.losses), list(self._desk.history.norms)

    @property
    def latest(self) -> StepMetrics | None:
        return self._desk.last

    def on_event(self, listener: Callable[[Event], None]) -> None:
        self._desk.journal.listeners.append(listener)

    @contained
    def forward_began(self) -> None:
        self._clock.forward_began()
        self._footing.begin()
        if self._anchor is not None:
            self._anchor.forward_began() if torch.is_grad_enabled() else self._anchor.evaluates()
        if self._footing.pending and torch.is_grad_enabled() and self._rounds.dropped():
            self._rounds.drop()  # loss scaling steps over its overflows, and with them over the end of a round
            self._read()
            self._end_step()

    @contained
    def forward_ended(self) -> None:
        if self._anchor is not None and torch.is_grad_enabled():
            self._anchor.forward_ended()

    # -- batches

    def batches(self, loader: Iterable[T] | None = None) -> Batches[Any]:
        self._iterates(loader)
        return super().batches() if loader is None else super().batches(loader)

    def fetch(self, get: Callable[[], T]) -> T:
        if threading.get_ident() != self._thread:  # a run is saved, and ended, where it trains
            self._fetched_elsewhere()
            return get()
        self._before_fetch()
        batch = get()
        self._fetched()
        return batch

    @contained
    def _iterates(self, loader: Any) -> None:
        if self._anchor is not None:
            self._anchor.iterates(loader)

    @contained
    def _fetched_elsewhere(self) -> None:
        if self._anchor is not None:
            self._anchor.elsewhere = True

    @contained
    def _before_fetch(self) -> None:
        if self._anchor is not None:
            self._anchor.before_fetch()

    @contained
    def _fetched(self) -> None:
        if self._anchor is not None:
            self._anchor.fetched()

    # -- backward

    def watch(self, loss: Tensor, batch: Any = None, *, progress: Progress = LOSS) -> Tensor:
        validate.check_loss(loss)
        if progress is not None and progress is not LOSS:
            validate.check_progress(progress)
        if not self.lost and loss.requires_grad:
            self._follow(loss, batch, progress)
        return loss

    @uncompiled
    @contained
    def _follow(self, loss: Tensor, batch: Any, progress: Progress) -> None:
        self._awaits_backward = True
        if self._anchor is not None:
            self._anchor.watched(batch)
        first, self._watched = not self._watched, True
        value, samples = loss.detach(), samples_in(batch)
        self._rounds.take_inputs(batch)
        if progress is LOSS:
            self._rounds.judged_by = JudgedBy.LOSS
        else:
            self._rounds.take_progress(progress)
        queue = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore[reportAttributeAccessIssue]

        def backward_began(gradient: Tensor) -> None:
            self._backward_began(gradient if first else None)
            # Others queue work for the end of backward too, such as the exchange of gradients: queued once more from
            # there, ours comes after theirs.
            queue(lambda: queue(lambda: self._backward_ended(value, gradient, samples)))

        loss.register_hook(backward_began)

    @contained
    def _backward_began(self, first: Tensor | None) -> None:
        self._awaits_backward = False
        rounds = self._rounds
        if rounds.backward_began() and self._footing.reins.empty():
            rounds.emptied()
        if (
            first is not None and rounds.scaler is None and abs(float(first)) >= validate.SCALED
        ):  # one look, at the start
            self._look_for_scaler(abs(float(first)))
        if rounds.dropped():
            rounds.drop()
            self._read()
        if not rounds.fits:
            self._rewire()

    @contained
    def _backward_ended(self, loss: Tensor, weight: Tensor, samples: float) -> None:
        if self._rounds.searching:
            return
        self._rounds.backward_ended(loss, weight.detach())
        so_far = self._rounds.samples
        self._rounds.samples = samples if so_far != so_far else so_far + samples

    def _look_for_scaler(self, factor: float) -> None:
        self._rounds.scaler = validate.find_scaler(factor)
        if self._rounds.scaler is not None:
            self._note("scaler", "a GradScaler was found at work; pass it as scaler= to be sure it is the right one")
            return
        told = (
            f"the loss is multiplied by {factor:g} before backward, and it cannot be told by whom: gradient norms are "
            "those of the scaled loss. Pass your GradScaler as scaler=."
        )
        log.warning("surefoot: %s", told)
        self._note("scaler", told)

    def _rewire(self) -> None:
        """The optimizers hold other parameters than before: start over with those."""
        old = self._rounds
        self._read(rest=True)
        old.release()
        self._rounds = self._build()
        self._rounds.scaler, self._rounds.attempt, self._rounds.order = old.scaler, old.attempt + 1, old.order
        self._desk.journal.layout(self._rounds.layout.names, self._rounds.layout.numels)
        self._desk.judge.rewired(self._rounds.layout.names, [(s.start, s.stop) for s in self._rounds.layout.scopes])
        self._footing.rewire(self._rounds)
        if self._anchor is not None:
            self._anchor.rewire(self._rounds)
        self._note("rewired", "the optimizers' parameter groups have changed; baselines start over")

    # -- step

    @contained
    def _before_step(self, k: int, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None and not self._watched:
            raise validate.Misuse(validate.NEVER_WATCHED)
        if closure is None:
            self._check_backward()
        if not self._rounds.fits:
            self._rewire()
        self._rounds.before(k)
        self._footing.before_step(k)
        if self._anchor is not None:
            self._anchor.before_step()
        if not callable(closure):
            self._rounds.decide(k)
            self._leave(k)
            return None
        guarded = functools.partial(self._closure, k, closure, [])
        if kwargs.get("closure"):
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    def _check_backward(self) -> None:
        """Warn of a loop that watches one loss and runs backward from another."""
        self._without_backward = self._without_backward + 1 if self._awaits_backward else 0
        self._awaits_backward = False
        if self._without_backward == validate.STEPS_WITHOUT_BACKWARD:
            log.warning("surefoot: %s", validate.NO_BACKWARD)
            self._note("no_backward", validate.NO_BACKWARD)

    def _closure(self, k: int, closure: Callable[[], Any], calls: list[int]) -> Any:
        """The user's closure, and the gate after it: its backward runs inside the step."""
        calls.append(k)
        searching = len(calls) > 1 and self._rounds.gates[k].veto_method is VetoMethod.COPY
        self._rounds.searching = searching
        with torch.enable_grad():
            result = closure()
        if not self._watched:
            raise validate.Misuse(validate.NEVER_WATCHED)
        self._after_closure(k, searching=searching)
        if not self.lost:
            self._leave(k, result)
        return result

    def _leave(self, k: int, result: Any = None) -> None:
        """Leave a step that was refused, where it can be left: else it runs without gradients."""
        gate = self._rounds.gates[k]
        if gate.refused and gate.veto_method is not VetoMethod.COPY and self._steps[k].active:
            raise StepRefused(gate.optimizer, result)

    def _refused(self, k: int) -> None:
        """A step was left: what comes after a step comes now."""
        self._after_step(k, self._optimizers[k], (), {})

    @contained
    def _after_closure(self, k: int, *, searching: bool) -> None:
        if not searching:
            self._rounds.decide(k)
        elif self._rounds.gates[k].refused:
            self._rounds.gates[k].hide()

    @contained
    def _after_step(self, k: int, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._thread = threading.get_ident()
        self._footing.after_step(k)
        self._rounds.after(k)
        self._withdraw(self._rounds.order.withdrawn)
        self._read()
        self._end_step()
        if self._rounds.over and self._anchor is not None:
            self._anchor.round_ended()

    def _end_step(self) -> None:
        """What was decided is carried out; the run goes back, and a state is taken, at the end of an iteration only."""
        if self._rounds.over:
            self._footing.round_ended()
        else:
            self._footing.step_ended()

    def _withdraw(self, attempt: int | None) -> None:
        """This attempt was not the last one of its iteration after all: no run goes on from a state taken there."""
        if attempt is None:
            return
        self._footing.withdraw(attempt)
        if self._anchor is not None:
            self._anchor.withdraw(attempt)

    def _read(self, *, rest: bool = False) -> None:
        for block, tag in self._rounds.arrived(rest=rest):
            self._footing.row_read(self._desk.read(block, tag))
            if self._anchor is not None:
                self._anchor.row_read()
            self._look_closer()
            for name in self._rounds.buffers.take_exempted():
                self._tell_exempted(name)

    def _tell_exempted(self, name: str) -> None:
        told = (
            f"buffer {name} became non-finite in {EXEMPT_AFTER} updates in a row while loss and gradients were finite: "
            "this is taken as intended, and the buffer is no longer checked"
        )
        if self._desk.journal.rank == 0:
            log.warning("surefoot: %s", told)
        self._note("buffers", told)

    def _look_closer(self) -> None:
        """In trouble: at the weights, and at where in the model it begins."""
        rounds, row = self._rounds, self._desk.last
        rounds.curious = self._desk.judge.wants_weight_check
        if row is not None and row.verdict is Verdict.NONFINITE and not math.isfinite(row.loss):
            origin = rounds.tracer.ask(row.attempt)
            if origin is None:
                rounds.tracer.arm()
            else:
                self._desk.locate(row, origin)

    # -- the user's words, and the end

    @contained
    def report(self, **values: float) -> None:
        values = validate.check_report(values)
        if "tokens" in values:
            so_far = self._rounds.tokens
            self._rounds.tokens = values["tokens"] if so_far != so_far else so_far + values["tokens"]
        known = {"tokens"} | ({"total_steps"} if values.get("total_steps") == self._desk.total else set())
        self._desk.total = float(values.get("total_steps", self._desk.total))
        self._rounds.eval_loss = float(values.get("eval_loss", self._rounds.eval_loss))
        told = {name: value for name, value in values.items() if name not in known}
        if self._anchor is not None:
            self._anchor.report(told)
        if told:
            self._desk.note("report", values=told, attempt=self._rounds.attempt)

    def _release_shadow(self) -> None:
        if self._shadow is not None:
            self._shadow.close()

    def _release_steps(self) -> None:
        for step in self._steps:
            step.close()

    def close(self) -> None:
        self._finish()
        anchor = self._anchor
        self._let_go(whole=not self.lost and getattr(sys, "last_value", None) is None)
        self.lost = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._rounds.release()
        self._footing.release()
        self._release_shadow()
        self._release_steps()
        GUARDED.difference_update(self._optimizers)
        atexit.unregister(self._at_exit)
        self._desk.journal.close()
        if anchor is not None:
            anchor.end_if_asked()

    @contained
    def _finish(self) -> None:
        if self._rounds.dropped():
            self._rounds.drop(last=True)
        for block, tag in self._rounds.arrived(rest=True):
            for decision in self._desk.read(block, tag):
                if decision.action is Action.STOP:  # the loop is over anyway
                    log.warning("surefoot would have stopped the run: %s", decision.reason)
        self._desk.finish_iteration()
        self._note("closed")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not self.lost:
            self._note("exception", f"{type(error).__name__}: {error}")
        if error is not None:
            self._let_go(whole=False)  # a batch may be lost on its way: what was saved last is exact
        self.close()

    def _let_go(self, *, whole: bool) -> None:
        anchor, self._anchor = self._anchor, None
        if anchor is not None:
            try:
                anchor.close(whole=whole)
            except Exception as error:
                log.error("surefoot: the last checkpoint was not saved: %s", error, exc_info=error)

    def _note(self, name: str, detail: str = "") -> None:
        self._desk.note(name, detail, attempt=self._rounds.attempt)

    def lose(self, error: Exception, where: str) -> None:
        """Something in here broke: say so, put everything back and let the training go on without protection."""
        self.lost = True
        log.error(
            "surefoot: protection is OFF for the rest of this run, training goes on: %s in %s. This is a fault in "
            "surefoot; please report it with the traceback below.",
            error,
            where,
            exc_info=error,
        )
        anchor = self._anchor
        self._let_go(whole=False)
        self._release_steps()
        self._rounds.release()
        self._footing.release()
        self._release_shadow()
        self._note("degraded", f"{type(error).__name__} in {where}: {error}")
        meter = self._rounds.meter
        if meter.ranks.world > 1:  # the others must not wait for this process in vain
            self._hooks.append(self._optimizers[0].register_step_pre_hook(lambda *_: meter.stand_in()))
        if anchor is not None:
            anchor.end_if_asked()

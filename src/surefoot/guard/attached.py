"""The attached guard: the hooks on one model and its optimizers, and the order in which they call everything else."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.checkpoint.buffers import BufferShadow
from surefoot.gate.veto import SkippableStep, StepRefused, VetoMethod
from surefoot.guard import validate
from surefoot.guard.batches import Batches
from surefoot.guard.context import GuardContext
from surefoot.guard.early_checks import EarlyChecks
from surefoot.guard.guard import LOSS, Guard, Progress
from surefoot.guard.guard_state import guard_state, load_guard_state
from surefoot.guard.hooks import GUARDED, close_if_alive, contained, register_hooks, uncompiled
from surefoot.guard.recovery import Recovery
from surefoot.guard.reported_values import take_reported
from surefoot.guard.run_info import open_metrics_reader
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.guard.update_restart import UpdateRestart
from surefoot.measure.batch_stats import count_samples
from surefoot.measure.resources import StepTimer
from surefoot.records import Action, Event, JudgedBy, StepMetrics

if TYPE_CHECKING:
    from surefoot.guard.checkpointer import Checkpointer

log = logging.getLogger("surefoot")
T = TypeVar("T")


class AttachedGuard(Guard):
    """Guards one model and its optimizers; attach.py shows all of a step."""

    def __init__(self, context: GuardContext) -> None:
        self.disabled = False
        """Protection has ended: the guard was closed, or disabled itself after an internal error."""
        self._context, self._optimizers = context, context.optimizers
        self._loss_watched = self._backward_awaited = False
        """A loss was ever watched; one was, and no backward has started from it yet."""
        self._steps_without_backward = 0  # in a row, from the watched loss
        self._training_thread, self._timer = threading.get_ident(), StepTimer()
        self._buffer_shadow = None if context.policy.observe else BufferShadow(context.model)
        self._checkpointer: Checkpointer | None = None  # stays so without `resume=True`
        try:
            self._pipeline = StepPipeline(context, timer=self._timer, shadow=self._buffer_shadow)
            self._reader = open_metrics_reader(context, self._pipeline, self._timer)
            self._recovery = Recovery(context, self._pipeline, self._reader, shadow=self._buffer_shadow)
            self._pipeline.attempt = self._reader.journal.last_attempt + 1
            self._recorder = self._recovery.enable_trials(self)
            if context.resume:
                from surefoot.guard.checkpointer import Checkpointer  # imports torch.distributed.checkpoint, slowly

                parts = context, self._pipeline, self._reader, self._recovery
                self._checkpointer = Checkpointer(*parts, shadow=self._buffer_shadow)
                self._checkpointer.start()
            self._recovery.start_bans()
        except BaseException:
            if self._buffer_shadow is not None:
                self._buffer_shadow.close()
            raise
        self.restarts = self._restart = UpdateRestart(self, self._recovery, self._reader, self._checkpointer)
        self._early_checks = EarlyChecks(self, context, self._reader) if context.preflight else None
        self._hooks = register_hooks(self, context, before_step=self._before_step, after_step=self._after_step)
        # A step that is left on the way has no post-hook of torch's, so SkippableStep calls `_after_step`.
        self._skippable_steps = [
            SkippableStep(o, functools.partial(self._after_step, k, o, (), {})) for k, o in enumerate(self._optimizers)
        ]
        self._at_exit = atexit.register(functools.partial(close_if_alive, weakref.ref(self)))

    # -- what the user reads

    @property
    def step(self) -> int:
        return self._reader.step

    @property
    def history(self) -> tuple[list[float], list[float]]:
        return list(self._reader.history.losses), list(self._reader.history.norms)

    @property
    def latest(self) -> StepMetrics | None:
        return self._reader.latest

    @property
    def healthy(self) -> bool:
        return not self.disabled and self._reader.judge.quiet

    def on_event(self, listener: Callable[[Event], None]) -> None:
        self._reader.journal.listeners.append(listener)

    def on_rewind(self, listener: Callable[[int, int], None]) -> None:
        self._recovery.rewind_listeners.append(listener)

    def state_dict(self) -> dict[str, Any]:
        self._call(functools.partial(self._read_arrived, drain=True))
        return guard_state(self._reader, self._recovery)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for note in load_guard_state(state, self._reader, self._recovery):
            self._warn("resumed", f"resumed, but {note}")

    # -- 1. fetching a batch

    def batches(self, loader: Iterable[T] | None = None) -> Batches[Any]:
        if self._checkpointer is not None:
            self._call(functools.partial(self._checkpointer.check_loader, loader))
        return super().batches() if loader is None else super().batches(loader)

    def fetch(self, get: Callable[[], T]) -> T:
        checkpointer = self._checkpointer
        if checkpointer is None:
            return get()
        if threading.get_ident() != self._training_thread:  # runs are saved and ended only in the thread that trains
            checkpointer.fetched_in_other_thread()
            return get()
        self._call(checkpointer.before_fetch)
        batch = get()
        self._call(checkpointer.after_fetch)
        return batch

    @contained
    def _call(self, call: Callable[[], None]) -> None:
        call()

    # -- 2. forward

    @contained
    def forward_began(self) -> None:
        self._timer.forward_began()
        if self._recovery.snapshots.last_attempt is None:
            self._recovery.first_forward_began()
        if self._recorder is not None and torch.is_grad_enabled():
            self._recorder.forward_began()
        if self._checkpointer is not None:
            self._checkpointer.forward_began()
        if self._recovery.decisions and torch.is_grad_enabled() and self._pipeline.grads_discarded():
            # On an overflow a GradScaler does not call optimizer.step(), so the iteration has to be ended here.
            self._pipeline.discard_attempt()
            self._read_arrived()
            if self._pipeline.order.ended:
                self._recovery.iteration_ended()
            else:
                self._recovery.step_ended()

    @contained
    def forward_ended(self) -> None:
        if self._checkpointer is not None and torch.is_grad_enabled():
            self._checkpointer.forward_ended()

    # -- 3. backward

    def watch(
        self, loss: Tensor, batch: Any = None, *, progress: Progress = LOSS, tokens: Tensor | float | None = None
    ) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            validate.check_loss(loss)  # says what is wrong; in an evaluation nothing is
        if progress is not LOSS or tokens is not None:
            validate.check_judged(progress, tokens)
        if not self.disabled and loss.requires_grad:
            self._hook_loss(loss, batch, progress, tokens)
        return loss

    @uncompiled
    @contained
    def _hook_loss(self, loss: Tensor, batch: Any, progress: Progress, tokens: Tensor | float | None) -> None:
        if self._checkpointer is not None:
            self._checkpointer.loss_watched(batch)
        if self._recorder is not None:
            self._recorder.watched(batch)
        first, self._loss_watched, self._backward_awaited = not self._loss_watched, True, True
        self._pipeline.record_inputs(batch)
        if self._early_checks is not None:
            self._early_checks.watched(loss, batch)
        if progress is LOSS:
            self._pipeline.judged_by = JudgedBy.LOSS
        else:
            self._pipeline.record_progress(progress)
        value = loss.detach()
        if tokens is not None:
            stats, new_update = self._pipeline.grad_stats, bool(self._pipeline.stepped)
            value = stats.loss_per_token(value, tokens, new_update=new_update)
        loss.register_hook(functools.partial(self._backward_began, value, count_samples(batch), first))

    @contained
    def _backward_began(self, loss: Tensor, samples: float, first: bool, gradient: Tensor) -> None:
        self._backward_awaited = False
        pipeline = self._pipeline
        if pipeline.stepped:  # since the last backward
            stale, overrides = pipeline.find_stale_grads(), self._recovery.overrides
            if (stale or overrides.in_force) and overrides.zero_stale_grads(stale=stale):
                pipeline.stale_grads_zeroed()
        elif pipeline.grads_discarded():
            pipeline.discard_attempt()
            self._read_arrived()
        if first and pipeline.scaler is None:
            factor = abs(float(gradient))  # a wait for the device, once, at the first backward of the run
            if factor >= validate.MIN_LOSS_SCALE:
                self._pipeline.scaler, message = validate.find_scaler(factor)
                (self._warn if self._pipeline.scaler is None else self._note)("scaler", message)
        if not pipeline.layout.matches(self._optimizers):
            self._replace_pipeline()
        # Others, such as DDP, queue callbacks for the end of backward too. A callback queued from within a callback
        # runs after all of those.
        queue = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore[reportAttributeAccessIssue]
        queue(functools.partial(queue, functools.partial(self._backward_ended, loss, gradient, samples)))

    @contained
    def _backward_ended(self, loss: Tensor, weight: Tensor, samples: float) -> None:
        if not self._pipeline.in_line_search:
            self._pipeline.backward_ended(loss, weight.detach(), samples)
            if self._recorder is not None:
                self._recorder.backward_ended(weight.detach())

    def _replace_pipeline(self) -> None:
        """Build a new pipeline, because the optimizers now hold other parameters."""
        self._read_arrived(drain=True)
        new = self._pipeline = self._pipeline.successor(self._context, self._timer, self._buffer_shadow)
        self._reader.rewired(new.layout)
        self._recovery.pipeline_replaced(new)
        if self._checkpointer is not None:
            self._checkpointer.pipeline_replaced(new)
        self._note("rewired", "the optimizers' parameter groups have changed; baselines start over")

    # -- 4. optimizer.step()

    @contained
    def _before_step(self, k: int, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            if not self._loss_watched:
                raise validate.Misuse(validate.NEVER_WATCHED)
            self._steps_without_backward = self._steps_without_backward + 1 if self._backward_awaited else 0
            self._backward_awaited = False
            if self._steps_without_backward == validate.STEPS_WITHOUT_BACKWARD:
                self._warn("no_backward", validate.NO_BACKWARD)
        if not self._pipeline.layout.matches(self._optimizers):
            self._replace_pipeline()
        self._pipeline.before_step(k)
        self._recovery.before_step(k)
        if self._recorder is not None:
            self._recorder.before_step(k)
        if self._checkpointer is not None:
            self._checkpointer.before_step()
        if not callable(closure):
            self._pipeline.decide(k)
            if self._pipeline.gates[k].refused:
                self._skip_step(k)
            return None
        guarded = functools.partial(self._guarded_closure, k, closure, [])
        if kwargs.get("closure"):
            return args, {**kwargs, "closure": guarded}
        return (args[0], guarded, *args[2:]), kwargs

    def _guarded_closure(self, k: int, closure: Callable[[], Any], calls: list[int]) -> Any:
        """Run the user's closure, then the gate: its backward runs inside the step."""
        calls.append(k)
        in_line_search = len(calls) > 1 and self._pipeline.gates[k].veto_method is VetoMethod.COPY
        self._pipeline.in_line_search = in_line_search
        with torch.enable_grad():
            result = closure()
        if not self._loss_watched:
            raise validate.Misuse(validate.NEVER_WATCHED)
        self._after_closure(k, in_line_search=in_line_search)
        if not self.disabled and self._pipeline.gates[k].refused:
            self._skip_step(k, result)
        return result

    @contained
    def _after_closure(self, k: int, *, in_line_search: bool) -> None:
        if not in_line_search:
            self._pipeline.decide(k)
        elif self._pipeline.gates[k].refused:
            self._pipeline.gates[k].hide_grads()

    def _skip_step(self, k: int, result: Any = None) -> None:
        """Leave a refused step where that is possible; otherwise it runs without gradients."""
        gate = self._pipeline.gates[k]
        if gate.veto_method is not VetoMethod.COPY and self._skippable_steps[k].active:
            raise StepRefused(gate.optimizer, result)

    @contained
    def _after_step(self, k: int, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._training_thread = threading.get_ident()
        if self._recovery.overrides.in_force:
            self._recovery.overrides.after_step(k)
        self._pipeline.after_step(k)
        if self._recorder is not None:
            self._recorder.step_ended(self._pipeline.attempt)
        if (withdrawn := self._pipeline.order.withdrawn) is not None:  # it did not end its iteration after all
            self._recovery.snapshots.withdraw(withdrawn)
            if self._checkpointer is not None:
                self._checkpointer.withdraw(withdrawn)
        self._read_arrived()
        if not self._pipeline.order.ended:
            self._recovery.step_ended()
            return
        self._recovery.iteration_ended()
        if self._checkpointer is not None:
            self._checkpointer.iteration_ended()
        if self._early_checks is not None and self._early_checks.step_ended(self._pipeline.attempt):
            self._early_checks = None

    def _read_arrived(self, *, drain: bool = False) -> None:
        """Read and judge the blocks sent two steps ago, or with `drain` all that are under way."""
        for block, context in self._pipeline.arrived_blocks(drain=drain):
            self._recovery.row_read(self._reader.read(block, context))
            if self._checkpointer is not None:
                self._checkpointer.row_read()
            self._reader.follow_up(self._pipeline)

    # -- report, and the end

    @contained
    def report(self, **values: float) -> None:
        metrics = take_reported(validate.check_report(values), self._pipeline, self._reader)
        if self._checkpointer is not None:
            self._checkpointer.report(metrics)
        if metrics:
            self._reader.note("report", values=metrics, attempt=self._pipeline.attempt)

    def close(self) -> None:
        self._finish()
        ended_well = not self._restart.ended_by_memory() and getattr(sys, "last_value", None) is None
        checkpointer = self._close_checkpointer(intact=ended_well and not self.disabled)
        self.disabled = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._release()
        GUARDED.difference_update(self._optimizers)
        atexit.unregister(self._at_exit)
        self._reader.journal.close()
        if checkpointer is not None:
            checkpointer.end_if_signalled()

    @contained
    def _finish(self) -> None:
        if self._pipeline.grads_discarded():
            self._pipeline.discard_attempt(last=True)
        for decision in self._reader.drain(self._pipeline):
            if decision.action is Action.STOP:  # the loop is over anyway
                log.warning("surefoot would have stopped the run: %s", decision.reason)
        self._reader.finish_iteration()
        self._note("closed")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            if not self.disabled:
                self._note("exception", f"{type(error).__name__}: {error}")
            self._restart.ended_by_memory()
            # The batch in progress may be lost, so this state is not exact; the last checkpoint is.
            self._close_checkpointer(intact=False)
        self.close()

    def _close_checkpointer(self, *, intact: bool) -> Checkpointer | None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close(intact=intact)
        return checkpointer

    def _release(self) -> None:
        """Leave model and optimizers as they would be without a guard, except for the hooks."""
        self._pipeline.release()
        self._recovery.release()
        if self._buffer_shadow is not None:
            self._buffer_shadow.close()
        for step in self._skippable_steps:
            step.close()

    def _note(self, name: str, detail: str = "") -> None:
        self._reader.note(name, detail, attempt=self._pipeline.attempt)

    def _warn(self, name: str, message: str) -> None:
        log.warning("surefoot: %s", message)
        self._note(name, message)

    def disable(self, error: Exception, where: str) -> None:
        """End protection after an internal error: log it, undo everything, and let the training continue."""
        self.disabled = True
        log.error(validate.INTERNAL_ERROR, error, where, exc_info=error)
        checkpointer = self._close_checkpointer(intact=False)
        self._release()
        self._note("degraded", f"{type(error).__name__} in {where}: {error}")
        stats = self._pipeline.grad_stats
        if stats.ranks.world_size > 1:  # take part in the other ranks' collectives, or they would wait for this one
            self._hooks.append(self._optimizers[0].register_step_pre_hook(lambda *_: stats.gather_zeros()))
        if checkpointer is not None:
            checkpointer.end_if_signalled()

"""surefoot in the Trainer of transformers, and in TRL's trainers, which are Trainers too.

    trainer = Trainer(..., callbacks=[SurefootCallback(run_dir="runs/a")])

The loss is taken where the Trainer calls `accelerator.backward`, so it does not matter who computed it. The Trainer's
step count, its schedule and its place in the data stay together and only go forward: a refused update counts as a step
of the Trainer's, and after a rewind the model goes on with the batches that come next.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from surefoot.actions.stop import TrainingStopped
from surefoot.guard.attach import attach
from surefoot.guard.guard import Guard
from surefoot.guard.validate import Misuse
from surefoot.integrations.doubted import TrainerCheckpoints, mark_doubted
from surefoot.integrations.trainer_options import Replaced, check_trainer_options, saves_wait
from surefoot.integrations.trainer_step_fn import TrainerStepFn
from surefoot.integrations.trl_rewards import Rewards

log = logging.getLogger("surefoot")
_FILLED_IN = ("scheduler", "scaler", "loader", "steps_of", "step", "on_stop")
_STATE_KEY = "surefoot"
"""The name of the guard's state among the callback states in trainer_state.json."""
_HOW_TO_RESUME = "trainer.train(resume_from_checkpoint=True)"
_DEEPSPEED = (
    "SurefootCallback: DeepSpeed clips and steps inside its own engine, where no update can be refused. Use FSDP, or "
    "leave the callback out."
)


class TransformersCallback(TrainerCallback):
    """Guards each `train()` of a Trainer; exported as `SurefootCallback`.

    Args:
        run_dir: Directory for the journal of this run; not the Trainer's `output_dir`, but it may be inside of it.
        options: Options of `surefoot.attach`, such as `policy` or `clip`. `step_fn` is supplied where it is sound: from
            the Trainer's `compute_loss`; `step_fn=None` turns trials off.
    """

    def __init__(self, run_dir: str | Path, **options: Any) -> None:
        check_trainer_options("SurefootCallback", "the Trainer", _HOW_TO_RESUME, options, filled_in=_FILLED_IN)
        self._run_dir, self._options = run_dir, options
        self.guard: Guard | None = None
        """The guard of the current `train()`, or of the last one."""
        self.stop_reason: str | None = None
        """Why surefoot ended the last `train()`; None where it did not."""
        self._trainer: Any = None
        self._replaced = Replaced()
        self._step_fn: TrainerStepFn | None = None
        self._rewards: Rewards | None = None
        self._checkpoints = TrainerCheckpoints()
        self._best: dict[Path, tuple[Any, Any, Any]] = {}
        """What the Trainer took for its best metric, step and checkpoint when it wrote each checkpoint."""
        self._waiting = self._waiting_eval = False
        """A save, an evaluation waits until the run is healthy."""
        self._eval_key: str | None = None

    # -- begin and end

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close()  # of a train() that ended with an exception
        trainer = self._trainer = _find_trainer(state)
        if trainer.is_deepspeed_enabled:
            raise Misuse(_DEEPSPEED)
        self.stop_reason, self._checkpoints, self._best = None, TrainerCheckpoints(), {}
        self._waiting = self._waiting_eval = False
        self._step_fn = TrainerStepFn(trainer)
        self._rewards = Rewards.of(trainer)
        own_step_fn = self._step_fn if self._rewards is None and self._step_fn.is_sound() else None
        self.guard = attach(
            trainer.model_wrapped,
            trainer.optimizer,
            run_dir=self._run_dir,
            scaler=trainer.accelerator.scaler,
            step=state.global_step,
            on_stop=self._stop,
            **{"step_fn": own_step_fn, **self._options},
        )
        self._load_guard_state(state)
        self.guard.on_rewind(self._rewound)
        self.guard.report(total_steps=state.max_steps)
        self._replaced.set(trainer, "compute_loss", self._step_fn.recording(trainer.compute_loss))
        self._replaced.set(trainer.accelerator, "backward", self._watching(trainer.accelerator.backward))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._replaced.undo()
        if self.guard is not None:
            self.guard.close()
        self._trainer = self._step_fn = self._rewards = None

    def _watching(self, backward: Any) -> Any:
        @functools.wraps(backward)
        def call(loss: Tensor, **kwargs: Any) -> Any:
            assert self.guard is not None
            assert self._step_fn is not None
            progress = {} if self._rewards is None else self._rewards.progress(loss)
            self.guard.watch(loss, self._step_fn.batch, **progress)
            return backward(loss, **kwargs)

        return call

    # -- after each step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stop_reason is not None:
            control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO
        if control.should_save or control.should_evaluate or self._waiting:
            self._settle_save(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_save or control.should_evaluate:
            self._settle_save(args, state, control)

    def _settle_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Let the Trainer save now, or when the run is healthy again, but not later than its next save is due.

        Evaluations that choose the best checkpoint wait with it.
        """
        assert self.guard is not None
        overdue = self._waiting and control.should_save
        if not (control.should_save or _may_save_best(args, control) or (self._waiting and not self._saves_wait())):
            return
        guard_state = self.guard.state_dict()  # reads all steps, so that the run is known to be healthy up to here
        if not self._saves_wait() or overdue or control.should_training_stop:
            control.should_save |= self._waiting
            control.should_evaluate |= self._waiting_eval
            self._waiting = self._waiting_eval = False
            _callback_states(state)[_STATE_KEY] = {"args": {}, "attributes": {"guard": json.dumps(guard_state)}}
            return
        with_eval = control.should_evaluate and (args.load_best_model_at_end or _may_save_best(args, control))
        self._waiting |= control.should_save
        self._waiting_eval |= with_eval
        control.should_save = False
        control.should_evaluate &= not with_eval
        log.warning("surefoot: the checkpoint of step %d waits until the run is healthy", state.global_step)

    def _saves_wait(self) -> bool:
        assert self.guard is not None
        return saves_wait(self.guard, self._options)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.guard is not None
        path = Path(self._trainer._get_output_dir(None)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._checkpoints.add(path, self.guard)
        self._best[path] = (state.best_metric, state.best_global_step, state.best_model_checkpoint)
        if self.stop_reason is not None and args.should_save and not _all_finite(self._trainer.model):
            mark_doubted(path)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the loss on held-out data; of several data sets, that of the first."""
        if self.guard is None or self._trainer is None or not metrics:
            return
        keys = [key for key in metrics if key.startswith("eval_") and key.endswith("_loss")]
        self._eval_key = "eval_loss" if "eval_loss" in metrics else self._eval_key or next(iter(keys), None)
        if self._eval_key in metrics:
            self.guard.report(eval_loss=metrics[self._eval_key])

    # -- what surefoot does

    def _rewound(self, step: int, attempt: int) -> None:
        trainer, state = self._trainer, self._trainer.state
        log.log(
            logging.WARNING if state.is_world_process_zero else logging.DEBUG,
            "surefoot: the model is as after %d applied updates; the Trainer's step count (%d), its schedule and its "
            "place in the data cannot go back with it and go on from where they are",
            step,
            state.global_step,
        )
        doubted = self._checkpoints.doubt_after(attempt, rename=trainer.args.should_save)
        if state.best_model_checkpoint is not None and Path(state.best_model_checkpoint) in doubted:
            trusted = [self._best[saved.path] for saved in self._checkpoints]
            best = trusted[-1] if trusted else (None, None, None)
            state.best_metric, state.best_global_step, state.best_model_checkpoint = best
        if self._rewards is not None:
            self._rewards.rewound()

    def _stop(self, reason: TrainingStopped) -> None:
        self.stop_reason = str(reason)

    def _load_guard_state(self, state: TrainerState) -> None:
        assert self.guard is not None
        saved = _callback_states(state).get(_STATE_KEY)
        if saved and state.global_step > 0:
            self.guard.load_state_dict(json.loads(saved["attributes"]["guard"]))


def _find_trainer(state: TrainerState) -> Any:
    """The Trainer in this state: a callback is not told which one calls it."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Trainer) and vars(candidate).get("state") is state:
            callbacks = candidate.callback_handler.callbacks
            if sum(isinstance(c, TransformersCallback) for c in callbacks) > 1:
                raise Misuse("SurefootCallback: this Trainer has two of them. Keep one: a run has one guard.")
            return candidate
    raise Misuse("SurefootCallback: no transformers Trainer uses it. Pass it as Trainer(..., callbacks=[...]).")


def _callback_states(state: TrainerState) -> dict[str, Any]:
    """What trainer_state.json holds of the callbacks."""
    states: Any = state.stateful_callbacks
    return states


def _may_save_best(args: TrainingArguments, control: TrainerControl) -> bool:
    """Whether the evaluation that is due decides if a checkpoint is saved."""
    return control.should_evaluate and args.save_strategy == SaveStrategy.BEST


def _all_finite(model: torch.nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


SurefootCallback = TransformersCallback

"""The step_fn of a transformers Trainer: its own compute_loss, on the inputs that it was given."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer


class TrainerStepFn:
    """Keeps the inputs of the current micro-batch, and computes the loss of kept ones again."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._compute_loss = trainer.compute_loss
        self.batch: dict[str, Any] | None = None
        """What the loss of the current micro-batch was computed from."""

    def is_sound(self) -> bool:
        """Whether the loss may be computed again: on several ranks only where that needs no communication."""
        own = type(self._trainer).compute_loss is not Trainer.compute_loss
        return self._trainer.args.world_size == 1 or not (own or self._trainer.compute_loss_func)

    def recording(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """The Trainer's `compute_loss`, which keeps what it was given in training."""

        @functools.wraps(compute_loss)
        def call(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self.batch = {
                    "inputs": dict(inputs),  # compute_loss may take labels out, or put options in
                    "num_items_in_batch": kwargs.get("num_items_in_batch"),
                    "accumulation_steps": self._trainer.current_gradient_accumulation_steps,
                }
            return compute_loss(model, inputs, *args, **kwargs)

        return call

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        trainer = self._trainer
        with self._unchanged(), trainer.compute_loss_context_manager():
            loss = self._compute_loss(
                model, dict(batch["inputs"]), num_items_in_batch=batch["num_items_in_batch"], return_outputs=False
            )
        # Micro-batches of an update are weighted alike here; a loss per token of the whole update is a part of it.
        return loss * batch["accumulation_steps"] if self._scaled(batch) else loss

    def _scaled(self, batch: dict[str, Any]) -> bool:
        """Whether `compute_loss` divides by what the whole update holds; as in `Trainer.training_step`."""
        trainer = self._trainer
        if getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
            return trainer.loss_is_scaled_for_ga
        per_token = trainer.model_accepts_loss_kwargs and batch["num_items_in_batch"] is not None
        return per_token or trainer.compute_loss_func is not None

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Leave no trace in the Trainer: TRL's add to metrics and counters in `compute_loss`."""
        before = dict(vars(self._trainer))
        if "_metrics" in before:
            self._trainer._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
        try:
            yield
        finally:
            vars(self._trainer).clear()
            vars(self._trainer).update(before)

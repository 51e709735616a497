"""Runs training steps on fake tensors, which have shapes but no values, and measures their memory by phase."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from surefoot.plan.block_stacks import Stack, find_stacks
from surefoot.plan.cuda_kernels import LikeCuda
from surefoot.plan.phase_tracker import Bytes, Phase, PhaseTracker, block_labels
from surefoot.plan.plan_error import PlanError
from surefoot.train.factories import call_factory, find_factory
from surefoot.train.mixed_precision import Precision
from surefoot.train.optimizers import plan_optimizers
from surefoot.train.recipe import Recipe, RecipeError
from surefoot.train.speed import attention, checkpoint_activations

CPU = torch.device("cpu")
_LOW_PRECISION = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class FakeStepOptions:
    """What changes the memory of a step beside the recipe."""

    keep_gradients: bool = False
    """Gradients stay allocated between backward passes: accumulation, or DDP's buckets."""
    low_precision_weights: bool = False
    """The weights themselves are in the recipe's type, as FSDP gathers them; else autocast makes copies."""


@dataclass(slots=True)
class StepMemory:
    """The measured bytes of one step."""

    peaks: dict[Phase, Bytes] = field(default_factory=dict)
    states: Bytes = field(default_factory=dict)
    """Between steps: weights, optimizer state."""
    kept: dict[Phase, int] = field(default_factory=dict)
    """Activations that each block keeps for backward."""
    kept_by_attention: dict[Phase, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model on fake tensors, with its stacks of equal blocks."""

    model: nn.Module
    stacks: list[Stack]


@contextlib.contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Fake tensors on the CPU; an operation that needs values becomes a PlanError."""
    try:
        with warnings.catch_warnings(), FakeTensorMode() as mode:
            warnings.simplefilter("ignore")
            yield mode
    except (PlanError, RecipeError):
        raise
    except Exception as error:
        raise PlanError(
            f"the model or its loss cannot run on fake tensors, which have shapes but no values: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}. Measure the real "
            "peak with surefoot check instead"
        ) from error


def make_fake_model(recipe: Recipe) -> FakeModel:
    """The recipe's model; call it in fake mode."""
    model = call_factory("model", recipe.model)
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"model.factory: {recipe.model.factory} returned a {type(model).__name__}, not a torch.nn.Module"
        )
    return FakeModel(model, find_stacks(model))


def run_fake_step(
    recipe: Recipe,
    make_batch: Callable[[], Any],
    lengths: tuple[int, ...] | None,
    starts: int,
    options: FakeStepOptions,
) -> StepMemory:
    """A step of the recipe's model, its stacks shortened to `lengths`, when the optimizer's state exists."""
    with fake_mode():
        fake = make_fake_model(recipe)
        for stack, length in zip(fake.stacks, lengths or [len(stack.blocks) for stack in fake.stacks], strict=True):
            stack.shorten(length)
        return _measure(fake, recipe, make_batch(), starts, options)


def _measure(fake: FakeModel, recipe: Recipe, batch: Any, starts: int, options: FakeStepOptions) -> StepMemory:
    model = fake.model
    try:
        precision = _prepare(model, recipe, options)
        checkpoint_activations(model, recipe.speed.checkpoint_activations)
        optimizers = _make_optimizers(model, recipe)
    except ValueError as error:  # names the key of the recipe
        raise PlanError(str(error)) from None
    loss_function = loss_function_of(recipe)
    stacks = [stack.blocks for stack in fake.stacks]
    labels = block_labels(stacks, [min(starts, len(blocks)) for blocks in stacks])
    memory = StepMemory()
    every = recipe.speed.checkpoint_activations
    tracker = PhaseTracker(model, labels, [block for blocks in stacks for block in (blocks[::every] if every else ())])
    model.train()
    with tracker, LikeCuda(), attention(recipe.speed):
        _make_optimizer_state(model, optimizers, tracker, keep_gradients=options.keep_gradients)
        memory.states = tracker.current()
        tracker.recording = True
        tracker.begin("forward", "start")
        with precision.forward():
            loss = mean_loss(loss_function, model, batch)
        tracker.begin("backward", "head")
        loss.backward()
        del loss
        tracker.begin("optimizer")
        for optimizer in optimizers:
            optimizer.step()
        tracker.recording = False
    memory.peaks, memory.kept, memory.kept_by_attention = tracker.peaks, tracker.kept, tracker.kept_by_attention
    return memory


def _make_optimizer_state(
    model: nn.Module, optimizers: list[Any], tracker: PhaseTracker, *, keep_gradients: bool
) -> None:
    """A step with gradients of zero, after which only what lasts is allocated."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    tracker.track_gradients(model)
    for optimizer in optimizers:
        optimizer.step()
    if not keep_gradients:
        model.zero_grad()


def _prepare(model: nn.Module, recipe: Recipe, options: FakeStepOptions) -> Precision:
    spec = recipe.precision
    if spec.compute == "tf32":  # the same bytes, and no change of torch's global settings
        spec = spec.model_copy(update={"compute": "float32"})
    precision = Precision(spec, CPU, sharded=options.low_precision_weights)
    if options.low_precision_weights and spec.compute in _LOW_PRECISION:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(_LOW_PRECISION[spec.compute])
    else:
        precision.prepare(model)
    return precision


def _make_optimizers(model: nn.Module, recipe: Recipe) -> list[Any]:
    """The recipe's optimizers; where none is fused, all tensors are updated together, as torch does on GPUs."""
    if any(p.dtype in _LOW_PRECISION.values() for p in model.parameters()):
        return []
    optimizers = []
    for plan in plan_optimizers(model, recipe.optimizer):
        optimizer = plan.make()
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        optimizers.append(optimizer)
    return optimizers


def loss_function_of(recipe: Recipe) -> Any:
    """The recipe's loss: (model, batch) -> mean, or (sum, count)."""
    spec = recipe.loss
    return call_factory("loss", spec) if spec.arguments else find_factory("loss.factory", spec.factory)


def mean_loss(loss_function: Any, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss as the training loop makes it, of a function that returns a mean or (sum, count)."""
    value = loss_function(model, batch)
    loss = value[0] / max(int(value[1]), 1) if isinstance(value, tuple) else value
    return loss.reshape(())


def language_batch(recipe: Recipe) -> Callable[[], Any]:
    """Makes a batch of tokens as `surefoot.data` does: inputs, targets and their count."""
    size, context = recipe.batch.size, recipe.data.context

    def make() -> Any:
        tokens = torch.zeros(size, context, dtype=torch.int64)
        return {"inputs": tokens, "targets": tokens.clone(), "count": size * context}

    return make


def fake_copy(batch: Any, size: int, wanted: int) -> Callable[[], Any]:
    """Makes a batch of `wanted` samples with the shapes and types of a real one, which has `size`."""

    def like(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == size:
            shape[0] = wanted
        return torch.zeros(shape, dtype=tensor.dtype)

    def make() -> Any:
        return tree_map_only(torch.Tensor, like, batch)

    return make

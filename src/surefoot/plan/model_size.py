"""What a plan needs to know of a model: how many weights it has and where, and the kind of task it is for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from surefoot.parallel import find_blocks
from surefoot.plan.fake_step import fake_mode, make_fake_model
from surefoot.plan.plan_error import PlanError
from surefoot.train.recipe import Recipe
from surefoot.train.speed import block_stacks


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of the whole model; tied weights count once."""

    parameters: int
    trained: int
    embedding: int
    """Weights of embeddings that are only looked up, not multiplied with."""
    blocks: list[int]
    """Weights of each block that FSDP shards separately."""
    buffer_bytes: int
    stack_names: list[str]
    stack_blocks: list[int]
    """Number of blocks in each stack of equal blocks."""
    can_recompute: bool
    """Whether it has blocks that activation checkpointing works on."""
    task: str
    """language, vision or other, by the kinds of its layers."""

    @property
    def largest_block(self) -> int:
        return max(self.blocks, default=self.parameters)

    @property
    def root(self) -> int:
        """Weights outside the blocks."""
        return self.parameters - sum(self.blocks)


def model_size(recipe: Recipe) -> ModelSize:
    """Build the whole model on fake tensors and count."""
    with fake_mode():
        fake = make_fake_model(recipe)
    model = fake.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not trained:
        raise PlanError(f"model.factory: {recipe.model.factory} made a model without trainable parameters")
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=trained,
        embedding=_looked_up(model),
        blocks=[_count(block.parameters()) for block in find_blocks(model)],
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        stack_names=[stack.name for stack in fake.stacks],
        stack_blocks=[len(stack.blocks) for stack in fake.stacks],
        can_recompute=bool(block_stacks(model)),
        task=_task(model),
    )


def _count(params: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def _looked_up(model: nn.Module) -> int:
    """Embeddings that no linear layer shares."""
    multiplied = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    weights = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(weight.numel() for key, weight in weights.items() if key not in multiplied)


def _task(model: nn.Module) -> str:
    modules = list(model.modules())
    if any(isinstance(module, nn.Embedding) and module.num_embeddings >= 128 for module in modules):
        return "language"
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return "vision" if any(isinstance(module, convolutions) for module in modules) else "other"

"""Finds stacks of equal blocks in a model and shortens them, so that two short models stand for a long one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from surefoot.train.speed import block_stacks


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal blocks in one container of the model."""

    name: str
    container: nn.ModuleList | nn.Sequential

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.container)

    def shorten(self, length: int) -> None:
        """Keep the first blocks only."""
        del self.container[length:]


def find_stacks(model: nn.Module) -> list[Stack]:
    """The stacks that activation checkpointing works on whose blocks are all equal."""
    chosen = [blocks for blocks in block_stacks(model) if len({_signature(block) for block in blocks}) == 1]
    stacks = []
    for name, module in model.named_modules():
        children = list(module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and any(_same(children, blocks) for blocks in chosen):
            stacks.append(Stack(name or type(module).__name__, module))
    return stacks


def _same(one: Sequence[nn.Module], other: Sequence[nn.Module]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _signature(block: nn.Module) -> str:
    """Equal for blocks with the same modules and weights of the same shapes."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    weights = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors]
    return f"{block!r} {weights}"

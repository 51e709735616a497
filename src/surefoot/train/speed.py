"""Speed and determinism settings: seeds, attention kernels, torch.compile, activation checkpointing."""

from __future__ import annotations

import functools
import os
import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from surefoot.train.recipe.schema import SpeedSection

F = TypeVar("F", bound=Callable[..., Any])

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_ON_CPU = ("auto", "flash", "math")
_HALF_ONLY = ("flash", "cudnn")


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch; only torch's seed, which dropout uses, depends on the rank.

    Call it with rank 0 before making the model, so that all ranks start with the same weights, and with the real rank
    afterwards, so that they drop out different units.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch_seed = np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] if rank else seed
    torch.manual_seed(int(torch_seed) % 2**63)


def configure_torch(spec: SpeedSection, device: torch.device, compute: str | None = None) -> None:
    """Configure torch for determinism or for the fastest kernels; call it before anything runs on the device."""
    _check_attention(spec, device, compute)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    if spec.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
    torch.use_deterministic_algorithms(spec.deterministic)
    torch.backends.cudnn.deterministic = spec.deterministic
    torch.backends.cudnn.benchmark = not spec.deterministic


def attention(spec: SpeedSection) -> AbstractContextManager[Any]:
    """Restrict the attention kernels; enclose the whole loop, because backward may recompute a block."""
    return nullcontext() if spec.attention == "auto" else sdpa_kernel(_BACKENDS[spec.attention])


def _check_attention(spec: SpeedSection, device: torch.device, compute: str | None) -> None:
    if device.type == "cpu" and spec.attention not in _ON_CPU:
        raise ValueError(
            f"speed.attention: {spec.attention} needs a GPU, and this run is on the CPU. "
            f"Use one of {', '.join(_ON_CPU)}"
        )
    if device.type == "cuda" and spec.attention in _HALF_ONLY and compute in ("float32", "tf32"):
        raise ValueError(
            f"speed.attention: {spec.attention} computes in bfloat16 and float16 only, and this run in {compute}. "
            "Use auto, efficient or math, or set precision.compute=bfloat16"
        )


def compiled(function: F, on: bool) -> F:
    """The function, compiled by torch.compile if `on`; compilation happens at the first call."""
    if not on:
        return function
    _check_compiler()
    return torch.compile(function)  # pyright: ignore[reportReturnType]


def _check_compiler() -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++", "gcc", "clang", "cl")):
        raise ValueError(
            "speed.compile: torch.compile needs a C++ compiler, and none was found. Install one, such as g++, or set "
            "speed.compile=false"
        )


def checkpoint_activations(model: nn.Module, every: int) -> int:
    """Recompute every n-th block's activations in backward instead of keeping them; returns the number of blocks."""
    if not every:
        return 0
    chosen = [block for stack in block_stacks(model) for block in stack[::every]]
    if not chosen:
        raise ValueError(
            "speed.checkpoint_activations: the model has no stack of blocks to recompute (an nn.ModuleList, or an "
            "nn.Sequential of one class). Put its blocks into one, or set it to 0"
        )
    for block in chosen:
        # Replaces the method, not the module, so that state_dict names stay the same; deepcopy keeps it.
        if getattr(block.forward, "func", None) is not _checkpointed:
            block.forward = functools.partial(_checkpointed, block.forward)
    return len(chosen)


def block_stacks(model: nn.Module) -> list[list[nn.Module]]:
    """The outermost stacks of blocks: a ModuleList of modules with children, or a Sequential of one such class."""
    children = list(model.children())
    is_stack = isinstance(model, nn.ModuleList) or (
        isinstance(model, nn.Sequential) and len(set(map(type, children))) == 1
    )
    if is_stack and len(children) > 1 and all(any(True for _ in child.children()) for child in children):
        return [children]
    return [stack for child in children for stack in block_stacks(child)]


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)

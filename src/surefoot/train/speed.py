"""What makes a run faster, or provably the same each time."""

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

from surefoot.train.recipe.schema import Speed

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
    """Seed Python, NumPy and torch; only torch's seed, which is dropout's, depends on the rank.

    Called with rank 0 before the model is made, all ranks begin with the same weights; called with the rank after
    that, they drop out different units.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    own = np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] if rank else seed
    torch.manual_seed(int(own) % 2**63)


def settle(spec: Speed, device: torch.device, compute: str | None = None) -> None:
    """Set torch up for the same bits each time, or for the fastest kernels, before anything runs on the device."""
    _check_attention(spec, device, compute)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    if spec.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is used for the first time
    torch.use_deterministic_algorithms(spec.deterministic)
    torch.backends.cudnn.deterministic = spec.deterministic
    torch.backends.cudnn.benchmark = not spec.deterministic


def attention(spec: Speed) -> AbstractContextManager[Any]:
    """The kernels attention may use; it belongs around the whole loop, as backward may compute a block again."""
    return nullcontext() if spec.attention == "auto" else sdpa_kernel(_BACKENDS[spec.attention])


def _check_attention(spec: Speed, device: torch.device, compute: str | None) -> None:
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
    """The function, fused by torch's compiler if that is asked for; the compiler works at the first call."""
    if not on:
        return function
    _check_compiler()
    return torch.compile(function)  # pyright: ignore[reportReturnType]


def _check_compiler() -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++", "gcc", "clang", "cl")):
        raise ValueError(
            "speed.compile: torch's compiler needs a C++ compiler, and none was found. Install one, such as g++, or "
            "set speed.compile=false"
        )


def checkpoint_activations(model: nn.Module, every: int) -> int:
    """Let every n-th block forget what it computed and compute it again in backward; how many do is returned."""
    if not every:
        return 0
    chosen = [block for row in block_rows(model) for block in row[::every]]
    if not chosen:
        raise ValueError(
            "speed.checkpoint_activations: the model has no row of blocks to compute again (an nn.ModuleList, or an "
            "nn.Sequential of one kind). Put its blocks into one, or set it to 0"
        )
    for block in chosen:
        # In place of the method, so that names in the state stay as they are; torch copies it along with the module.
        block.forward = functools.partial(_again, block.forward)
    return len(chosen)


def block_rows(model: nn.Module) -> list[list[nn.Module]]:
    """The outermost rows of blocks: a list of modules that have parts, or a sequence of such of one kind."""
    children = list(model.children())
    row = isinstance(model, nn.ModuleList) or (isinstance(model, nn.Sequential) and len(set(map(type, children))) == 1)
    if row and len(children) > 1 and all(any(True for _ in child.children()) for child in children):
        return [children]
    return [found for child in children for found in block_rows(child)]


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)

"""Makes a fake step on the CPU keep what CUDA kernels keep: dropout masks, attention, and autocast's float32 list."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_FLOAT32: frozenset[Any] = frozenset(
    {
        F.layer_norm,
        F.group_norm,
        F.softmax,
        F.log_softmax,
        F.cross_entropy,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.kl_div,
        F.cosine_similarity,
        F.softplus,
        F.binary_cross_entropy_with_logits,
        torch.softmax,
        torch.log_softmax,
        torch.layer_norm,
        torch.Tensor.softmax,
        torch.Tensor.log_softmax,
        torch.logsumexp,
        torch.Tensor.logsumexp,
    }
)
"""Functions that CUDA's autocast computes in float32 and the CPU's does not."""


class LikeCuda(TorchFunctionMode):
    """CUDA's dropout keeps one byte per value and its attention kernels none; on the CPU both would keep more."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and torch.backends.cuda.flash_sdp_enabled():
            return _attention(*args, **kwargs)
        if func in _FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _to_float32, (args, kwargs))
        return func(*args, **kwargs)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **more: Any
) -> Any:
    """Without dropout, for which the CPU has no fused kernel; CUDA's keeps only its random seed."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *rest, **more)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

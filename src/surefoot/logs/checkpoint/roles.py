"""What a tensor is for, as far as its name and its shape tell."""

from __future__ import annotations

import re
from enum import StrEnum

from surefoot.logs.checkpoint.held import Held


class Role(StrEnum):
    MATRIX = "matrix"
    """Weights of a linear or convolutional layer."""
    EMBEDDING = "embedding"
    NORM = "norm"
    """The factor of a normalisation."""
    BIAS = "bias"
    ADAPTER = "adapter"
    """The half of a low-rank adapter that starts at zero."""
    MEASURED = "measured"
    """Mean and variance that a batch norm has seen."""
    BUFFER = "buffer"
    """Not trained: masks, positions, tables."""
    OTHER = "other"


_BUFFER = re.compile(
    r"mask|inv_freq|freqs|rotary|alibi|position_ids|relative_position|relative_coords|rel_pos_index"
    r"|(^|[._])(sin|cos|pe|anchors?|anchor_grid|strides?|grid|indices|buffer|cache|zero_points?|scales?|absmax"
    r"|quant_map|min_val|max_val|sigmas?|betas?_?t?|alphas?_?t?|alphas_cumprod\w*|sqrt_\w+|posterior_\w+|log_one_\w+"
    r"|ema_count|cluster_size|rng\w*|mean|std|var)($|[._]\d*$)"
)
_EMBEDDING = re.compile(
    r"embed|(^|[._])(wte|wpe|tok|token|pos|shared|vocab|codebook|emb)\w*([._]|$)|cls_token|query_tokens"
)
_ADAPTER = re.compile(r"lora_?b|lora_up|lora_embedding_b|hada_w[12]_b|lokr_w2_b", re.IGNORECASE)


def role_of(held: Held) -> Role:
    name = held.name.lower()
    wide = sum(size > 1 for size in held.shape)
    role = Role.OTHER
    if name.endswith(("running_var", "running_mean")):
        role = Role.MEASURED
    elif _ADAPTER.search(name):
        role = Role.ADAPTER
    elif _BUFFER.search(name) or (re.search(r"attn\.(masked_)?bias$", name) and len(held.shape) != 1):
        role = Role.BUFFER
    elif len(held.shape) == 1 and name.endswith(("bias", ".b", "beta", "_b")):
        role = Role.BIAS
    elif len(held.shape) == 1 and name.endswith(("weight", "gamma", "scale", ".w", ".g")):
        role = Role.NORM
    elif _EMBEDDING.search(name):
        role = Role.EMBEDDING
    elif wide >= 2:
        role = Role.MATRIX
    return role


def family(name: str) -> str:
    """The name with its numbers left out: the same part of every layer."""
    return re.sub(r"\d+", "#", name)

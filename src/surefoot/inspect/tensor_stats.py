"""Statistics of one tensor (counts, extremes, norm, zero rows) and the role its name and shape suggest."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from surefoot.inspect.contents import Numbers, StoredTensor

_CHUNK_VALUES = 1 << 22
"""Values in memory at a time."""


@dataclass(slots=True)
class TensorStats:
    """Counts, extremes and norm of one tensor; extremes and norm cover its finite values only."""

    count: int = 0
    nans: int = 0
    plus_infs: int = 0
    minus_infs: int = 0
    min: float = math.inf
    max: float = -math.inf
    sum_of_squares: float = 0.0
    zeros: int = 0
    rows: int = 0
    zero_rows: int = 0
    """Rows that are all zero."""
    nonfinite_rows: int = 0
    """Rows with a NaN or Inf."""

    @property
    def nonfinite(self) -> int:
        return self.nans + self.plus_infs + self.minus_infs

    @property
    def norm(self) -> float:
        return math.sqrt(self.sum_of_squares)

    @property
    def rms(self) -> float:
        return math.sqrt(self.sum_of_squares / max(1, self.count - self.nonfinite))

    @property
    def abs_max(self) -> float:
        return max(abs(self.min), abs(self.max)) if self.min <= self.max else 0.0

    @property
    def is_constant(self) -> bool:
        return self.min == self.max and not self.nonfinite

    @property
    def is_mask(self) -> bool:
        """Whether it looks like an attention mask: -Inf in places, one constant value elsewhere."""
        return self.minus_infs > 0 and not self.nans and not self.plus_infs and self.min >= self.max


def tensor_stats(tensor: StoredTensor) -> TensorStats:
    """Measure a tensor in one pass, in chunks of whole rows where a row fits into a chunk."""
    stats = TensorStats()
    width = math.prod(tensor.shape[1:]) if len(tensor.shape) > 1 else 0
    size = max(1, _CHUNK_VALUES // width) * width if 0 < width <= _CHUNK_VALUES else _CHUNK_VALUES
    by_rows = 1 < width <= _CHUNK_VALUES
    with np.errstate(all="ignore"):
        for chunk in tensor.chunks(size):
            _add(stats, chunk)
            if by_rows:
                _add_rows(stats, chunk.reshape(-1, width))
    return stats


def _add(stats: TensorStats, chunk: Numbers) -> None:
    if not chunk.size:
        return
    stats.count += chunk.size
    low, high = float(chunk.min()), float(chunk.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        stats.nans += int(np.isnan(chunk).sum())
        stats.plus_infs += int((chunk == np.inf).sum())
        stats.minus_infs += int((chunk == -np.inf).sum())
        chunk = chunk[np.isfinite(chunk)]
        if not chunk.size:
            return
        low, high = float(chunk.min()), float(chunk.max())
    stats.min, stats.max = min(stats.min, low), max(stats.max, high)
    square = float(np.dot(chunk, chunk))
    stats.sum_of_squares += square if 1e-30 < square < 1e30 else float(np.square(chunk.astype(np.float64)).sum())
    stats.zeros += chunk.size - int(np.count_nonzero(chunk))


def _add_rows(stats: TensorStats, rows: Numbers) -> None:
    stats.rows += len(rows)
    if stats.zeros >= rows.shape[1]:
        stats.zero_rows += int((~rows.any(axis=1)).sum())
    if stats.nonfinite:
        stats.nonfinite_rows += int((~np.isfinite(rows).all(axis=1)).sum())


class TensorRole(StrEnum):
    """What a tensor is for."""

    MATRIX = "matrix"
    """Weight of a linear or convolutional layer."""
    EMBEDDING = "embedding"
    NORM = "norm"
    """Scale of a normalisation layer."""
    BIAS = "bias"
    ADAPTER = "adapter"
    """The LoRA half that is initialised to zero."""
    RUNNING_STAT = "measured"
    """Running mean and variance of a batch norm."""
    BUFFER = "buffer"
    """Not trained: masks, positions, lookup tables."""
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


def role_of(tensor: StoredTensor) -> TensorRole:
    name = tensor.name.lower()
    wide = sum(size > 1 for size in tensor.shape)
    role = TensorRole.OTHER
    if name.endswith(("running_var", "running_mean")):
        role = TensorRole.RUNNING_STAT
    elif _ADAPTER.search(name):
        role = TensorRole.ADAPTER
    elif _BUFFER.search(name) or (re.search(r"attn\.(masked_)?bias$", name) and len(tensor.shape) != 1):
        role = TensorRole.BUFFER
    elif len(tensor.shape) == 1 and name.endswith(("bias", ".b", "beta", "_b")):
        role = TensorRole.BIAS
    elif len(tensor.shape) == 1 and name.endswith(("weight", "gamma", "scale", ".w", ".g")):
        role = TensorRole.NORM
    elif _EMBEDDING.search(name):
        role = TensorRole.EMBEDDING
    elif wide >= 2:
        role = TensorRole.MATRIX
    return role


def layer_family(name: str) -> str:
    """The name with numbers replaced by #, which is the same for every layer."""
    return re.sub(r"\d+", "#", name)

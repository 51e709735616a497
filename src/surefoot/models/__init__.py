"""Models to train, in plain torch: nothing here knows about surefoot."""

from __future__ import annotations

from surefoot.models.decoder import (
    SIZES,
    Decoder,
    DecoderConfig,
    count_parameters,
    decoder,
    next_token,
    next_token_loss,
)
from surefoot.models.writing import generate

__all__ = [
    "SIZES",
    "Decoder",
    "DecoderConfig",
    "count_parameters",
    "decoder",
    "generate",
    "next_token",
    "next_token_loss",
]

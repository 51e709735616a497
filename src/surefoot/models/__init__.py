"""Models to train, in plain torch, independent of the rest of surefoot."""

from __future__ import annotations

from surefoot.models.decoder import (
    SIZES,
    Decoder,
    DecoderConfig,
    count_parameters,
    decoder,
    generate,
    next_token,
    next_token_loss,
)

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

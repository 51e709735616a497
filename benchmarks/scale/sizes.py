"""The decoders of `surefoot bench scale`, and how each is trained."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.models.decoder import DecoderConfig

BYTES = 256
_REFERENCE_UPDATES = 360
"""Scenarios state their stretches for runs of this length; in shorter runs they are shorter in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSize:
    """A decoder and its training run."""

    name: str
    model: DecoderConfig
    updates: int
    onset: int
    """The update at which most faults begin."""
    warmup: int
    lr: float
    batch: int
    eval_every: int
    eval_batches: int
    """Batches of the evaluation during the run."""
    final_batches: int
    """Batches of the evaluation at the end, which is scored."""

    @property
    def context(self) -> int:
        return self.model.context

    def scaled(self, updates: int) -> int:
        """A stretch of a run, given for `_REFERENCE_UPDATES` updates."""
        return max(1, round(updates * self.updates / _REFERENCE_UPDATES))


SIZES = {
    "85m": ScaleSize(
        name="85m",
        model=DecoderConfig(vocab=BYTES, width=768, layers=12, heads=6, context=512),
        updates=360,
        onset=135,  # by then rules with a window of 128 have filled it
        warmup=30,
        lr=6e-4,
        batch=8,
        eval_every=20,
        eval_batches=2,
        final_batches=24,
    ),
    "small": ScaleSize(
        name="small",
        model=DecoderConfig(vocab=BYTES, width=128, layers=4, heads=4, context=64),
        updates=360,
        onset=135,
        warmup=30,
        lr=2e-3,
        batch=8,
        eval_every=20,
        eval_batches=2,
        final_batches=64,
    ),
    "tiny": ScaleSize(
        name="tiny",
        model=DecoderConfig(vocab=BYTES, width=128, layers=5, heads=4, context=32),
        updates=60,
        onset=24,
        warmup=5,
        lr=3e-3,
        batch=4,
        eval_every=10,
        eval_batches=2,
        final_batches=16,
    ),
}

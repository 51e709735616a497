"""Faults in the data."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from benchmarks.zoo.families import MicroBatch
from benchmarks.zoo.scenario import fault
from benchmarks.zoo.training import ZooRun
from surefoot.records import Cause


def _first(like: Tensor, share: float) -> Tensor:
    """True for the first samples of a batch."""
    return (torch.arange(len(like)) < share * len(like)).view(-1, *[1] * (like.dim() - 1))


def _multiplied(batch: MicroBatch, factor: float | Tensor) -> MicroBatch:
    """Inputs and labels in another unit."""
    return batch.replace(x=batch.x * factor, y=batch.y * factor)


@fault(Cause.BAD_BATCH, on={"plain": "!!!", "residual": "..!"}, strengths=(10.0, 100.0, 1e6))
def bad_batch(run: ZooRun, at: int, strength: float) -> None:
    """One batch comes in multiplied, once."""
    run.on_batch(lambda step, batch: batch.replace(x=batch.x * strength) if step == at else batch)


@fault(
    Cause.BAD_BATCH,
    on={"recurrent": ".!!", "autoencoder": ".!!"},
    strengths=(5.0, 100.0, math.inf),
    precision="bfloat16",
)
def poisoned_sample(run: ZooRun, at: int, strength: float) -> None:
    """One sample is far too large, and comes back every 20 steps."""

    def poisoned(step: int, batch: MicroBatch) -> MicroBatch:
        if step < at or (step - at) % 20:
            return batch
        sizes = torch.ones_like(batch.x)
        sizes[0] = strength
        return _multiplied(batch, sizes)

    run.on_batch(poisoned)


@fault(
    Cause.BAD_BATCH,
    on={"plain": "!!!", "memory": ".!!"},
    strengths={"plain": (3.0, 30.0, 1e4), "memory": (2.0, 30.0, 1e4)},
)
def periodic_bad_shard(run: ZooRun, at: int, strength: float) -> None:
    """Three batches of every 25 come from a shard in another unit."""
    run.on_batch(lambda step, batch: _multiplied(batch, strength) if step >= at and (step - at) % 25 < 3 else batch)


@fault(
    Cause.BAD_BATCH,
    on={"decoder": "..!", "vision_language": "..!"},
    strengths=(1.0, 5.0, 120.0),
    onset=250,
    steps=420,
)
def garbage_batches(run: ZooRun, at: int, strength: float) -> None:
    """A number of batches in a row are garbage: inputs, tokens and labels are shuffled."""

    def garbage(step: int, batch: MicroBatch) -> MicroBatch:
        if not at <= step < at + strength:
            return batch
        rng = Generator().manual_seed(run.settings.seed * 65_537 + step)
        extra = None if batch.extra is None else _shuffled(rng, batch.extra)
        return MicroBatch(_shuffled(rng, batch.x), _shuffled(rng, batch.y), extra)

    run.on_batch(garbage)


def _shuffled(rng: Generator, values: Tensor) -> Tensor:
    return values.flatten()[torch.randperm(values.numel(), generator=rng)].view_as(values)


@fault(
    Cause.BAD_BATCH,
    on={"decoder": "..!", "vision_language": "..!"},
    strengths=(1.0, 5.0, 140.0),
    onset=250,
    steps=420,
)
def repeated_tokens(run: ZooRun, at: int, strength: float) -> None:
    """In a number of batches in a row every sequence is one repeated token."""

    def repeated(step: int, batch: MicroBatch) -> MicroBatch:
        if not at <= step < at + strength:
            return batch
        first = batch.y[:, :1].expand_as(batch.y)
        return batch.replace(x=first, y=first) if batch.extra is None else batch.replace(extra=first, y=first)

    run.on_batch(repeated)


@fault(
    Cause.INPUT_SCALE,
    on={"plain": "!!!", "autoencoder": "!!!", "vision_language": "..."},
    strengths=(2.0, 10.0, 128.0),
    curable=False,
)
def unnormalised_input(run: ZooRun, at: int, strength: float) -> None:
    """Inputs are no longer normalised: they are far too large and not centred at 0."""
    run.on_batch(lambda step, batch: batch.replace(x=strength * (batch.x + 1)) if step >= at else batch)


@fault(
    Cause.INPUT_SCALE,
    on={"convolution": ".!!", "residual": ".!!"},
    strengths={"convolution": (0.25, 0.94, 1.0), "residual": (0.1, 0.9, 1.0)},
    curable=False,
)
def black_pictures(run: ZooRun, at: int, strength: float) -> None:
    """A share of the images is all black."""

    def black(step: int, batch: MicroBatch) -> MicroBatch:
        return batch.replace(x=batch.x.masked_fill(_first(batch.x, strength), -1.0)) if step >= at else batch

    run.on_batch(black)


@fault(
    Cause.LABELS,
    on={"plain": ".!!", "residual": "!!!"},
    strengths={"plain": (0.05, 0.4, 1.0), "residual": (0.2, 0.4, 1.0)},
    curable=False,
    optimizer=torch.optim.Adagrad,
    lr=0.03,
)
def wrong_labels(run: ZooRun, at: int, strength: float) -> None:
    """A share of the samples has the label of another."""

    def wrong(step: int, batch: MicroBatch) -> MicroBatch:
        return batch.replace(y=batch.y.roll(1, 0).where(_first(batch.y, strength), batch.y)) if step >= at else batch

    run.on_batch(wrong)


@fault(
    Cause.LABELS,
    on={"convolution": "!!!", "vision_language": ".!!"},
    strengths={"convolution": (0.1, 0.4, 1.0), "vision_language": (0.05, 0.4, 1.0)},
    curable=False,
)
def labels_shifted(run: ZooRun, at: int, strength: float) -> None:
    """In a share of the samples labels are off by one class."""

    def shifted(step: int, batch: MicroBatch) -> MicroBatch:
        return batch.replace(y=((batch.y + 1) % 10).where(_first(batch.y, strength), batch.y)) if step >= at else batch

    run.on_batch(shifted)


@fault(
    Cause.LABELS,
    on={"decoder": ".!!", "vision_language": ".!!"},
    strengths=(0.05, 0.4, 1.0),
    curable=False,
    optimizer=torch.optim.Adamax,
    lr=5e-3,
)
def labels_not_moved(run: ZooRun, at: int, strength: float) -> None:
    """A share of the sequences has its own tokens as labels, not those that follow them."""

    def unshifted(step: int, batch: MicroBatch) -> MicroBatch:
        tokens = batch.x if batch.extra is None else batch.extra
        return batch.replace(y=tokens.where(_first(batch.y, strength), batch.y)) if step >= at else batch

    run.on_batch(unshifted)


@fault(
    Cause.DRIFT,
    on={"recurrent": ".!!", "memory": ".!!"},
    strengths=(0.0005, 0.01, 0.1),
    curable=False,
    optimizer=torch.optim.Adamax,
    lr=1e-2,
)
def drift(run: ZooRun, at: int, strength: float) -> None:
    """Inputs drift a little further every step, while the labels stay."""
    run.on_batch(lambda step, batch: batch.replace(x=batch.x + strength * (step - at)) if step >= at else batch)


@fault(
    Cause.OVERFITTING,
    on={"decoder": ".!!", "residual": "!!!"},
    strengths={"decoder": (40.0, 4.0, 1.0), "residual": (16.0, 4.0, 1.0)},
    curable=False,
)
def stuck_loader(run: ZooRun, at: int, strength: float) -> None:
    """The loader repeats the same few batches."""
    first_batches: dict[float, MicroBatch] = {}
    run.on_batch(lambda step, batch: first_batches.setdefault((step - at) % strength, batch) if step >= at else batch)

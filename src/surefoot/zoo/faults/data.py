"""What is wrong with the data."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from surefoot.records import Cause
from surefoot.zoo.families import Batch
from surefoot.zoo.run import Run
from surefoot.zoo.scenario import fault


@fault(Cause.BAD_BATCH, on={"plain": "!!!", "residual": "..!"}, strengths=(10.0, 100.0, 1e6))
def bad_batch(run: Run, at: int, strength: float) -> None:
    """One batch comes in multiplied, once."""
    run.on_batch(lambda step, batch: batch.with_(x=batch.x * strength) if step == at else batch)


def _shuffled(values: Tensor, rng: Generator) -> Tensor:
    return values.flatten()[torch.randperm(values.numel(), generator=rng)].view_as(values)


@fault(Cause.BAD_BATCH, on={"decoder": "..!", "vision_language": "..!"}, strengths=(1.0, 10.0, 120.0))
def garbage_batches(run: Run, at: int, strength: float) -> None:
    """Some batches in a row are garbage, labels too."""

    def garbage(step: int, batch: Batch) -> Batch:
        if not at <= step < at + strength:
            return batch
        rng = Generator().manual_seed(run.settings.seed * 7 + step)
        return Batch(*(None if part is None else _shuffled(part, rng) for part in (batch.x, batch.y, batch.more)))  # pyright: ignore[reportArgumentType]

    run.on_batch(garbage)


@fault(Cause.BAD_BATCH, on={"decoder": "..!", "encoder": "..!"}, strengths=(1.0, 5.0, 40.0), steps=420)
def repeated_tokens(run: Run, at: int, strength: float) -> None:
    """Some batches in a row hold one token again and again."""

    def repeated(step: int, batch: Batch) -> Batch:
        first = batch.with_(x=batch.x[:, :1].expand_as(batch.x), y=batch.y[:, :1].expand_as(batch.y))
        return first if at <= step < at + strength else batch

    run.on_batch(repeated)


def _other_unit(batch: Batch, factor: float | Tensor) -> Batch:
    return batch.with_(x=batch.x * factor, y=batch.y * factor)


@fault(Cause.BAD_BATCH, on={"recurrent": "..!", "autoencoder": "..!"}, strengths=(10.0, 1000.0, math.inf))
def poisoned_sample(run: Run, at: int, strength: float) -> None:
    """One sample is far too large, and comes back every 20 steps."""

    def poisoned(step: int, batch: Batch) -> Batch:
        if step < at or (step - at) % 20:
            return batch
        factor = torch.ones(len(batch.x), *[1] * (batch.x.dim() - 1))
        factor[0] = strength
        return _other_unit(batch, factor)

    run.on_batch(poisoned)


@fault(Cause.BAD_BATCH, on={"plain": ".!!", "memory": ".!!"}, strengths=(3.0, 30.0, 1e4))
def periodic_bad_shard(run: Run, at: int, strength: float) -> None:
    """Three batches of every 25 come from a shard in another unit."""
    run.on_batch(lambda step, batch: _other_unit(batch, strength) if step >= at and (step - at) % 25 < 3 else batch)


@fault(
    Cause.INPUT_SCALE, on={"convolution": "!!!", "vision_language": "!!!"}, strengths=(2.0, 10.0, 128.0), curable=False
)
def unnormalised_input(run: Run, at: int, strength: float) -> None:
    """Inputs are no longer normalised: too large, and no longer around 0."""
    run.on_batch(lambda step, batch: batch.with_(x=strength * (batch.x + 1)) if step >= at else batch)


@fault(
    Cause.INPUT_SCALE, on={"convolution": "!!!", "vision_language": "!!!"}, strengths=(0.3, 0.7, 1.0), curable=False
)
def black_pictures(run: Run, at: int, strength: float) -> None:
    """A share of the pictures is all black."""

    def black(step: int, batch: Batch) -> Batch:
        some = torch.arange(len(batch.x)) < strength * len(batch.x)
        return batch.with_(x=batch.x.masked_fill(some[:, None, None, None], -1.0)) if step >= at else batch

    run.on_batch(black)


def _of_some(y: Tensor, wrong: Tensor, share: float) -> Tensor:
    """Wrong labels for the first samples."""
    some = torch.arange(len(y)) < share * len(y)
    return torch.where(some.view(-1, *[1] * (y.dim() - 1)), wrong, y)


@fault(Cause.LABELS, on={"plain": ".!!", "residual": ".!!"}, strengths=(0.1, 0.4, 1.0), curable=False)
def wrong_labels(run: Run, at: int, strength: float) -> None:
    """A share of the samples has the label of another."""

    def wrong(step: int, batch: Batch) -> Batch:
        return batch.with_(y=_of_some(batch.y, batch.y.roll(1, 0), strength)) if step >= at else batch

    run.on_batch(wrong)


@fault(Cause.LABELS, on={"convolution": ".!!", "vision_language": ".!!"}, strengths=(0.1, 0.4, 1.0), curable=False)
def labels_shifted(run: Run, at: int, strength: float) -> None:
    """A share of the labels is off by one class."""

    def shifted(step: int, batch: Batch) -> Batch:
        return batch.with_(y=_of_some(batch.y, (batch.y + 1) % 10, strength)) if step >= at else batch

    run.on_batch(shifted)


@fault(Cause.LABELS, on={"decoder": ".!!", "vision_language": ".!!"}, strengths=(0.1, 0.4, 1.0), curable=False)
def labels_not_moved(run: Run, at: int, strength: float) -> None:
    """A share of the sequences has its own tokens as labels, not the ones that follow."""

    def unmoved(step: int, batch: Batch) -> Batch:
        tokens = batch.x if batch.more is None else batch.more
        return batch.with_(y=_of_some(batch.y, tokens, strength)) if step >= at else batch

    run.on_batch(unmoved)


@fault(Cause.DRIFT, on={"recurrent": ".!!", "autoencoder": ".!!"}, strengths=(0.001, 0.01, 0.1), curable=False)
def drift(run: Run, at: int, strength: float) -> None:
    """Inputs move away, a little further every step."""
    run.on_batch(lambda step, batch: batch.with_(x=batch.x + strength * (step - at)) if step >= at else batch)


@fault(Cause.OVERFITTING, on={"decoder": ".!!", "encoder": "!!!"}, strengths=(16.0, 4.0, 1.0), curable=False)
def stuck_loader(run: Run, at: int, strength: float) -> None:
    """The loader goes round the same few batches."""
    kept: dict[float, Batch] = {}
    run.on_batch(lambda step, batch: kept.setdefault((step - at) % strength, batch) if step >= at else batch)

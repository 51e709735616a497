"""Healthy runs with unusual data: batches, labels, inputs and sequences that look suspicious and are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor

from benchmarks.zoo.controls.randomness import step_normal, step_rng
from benchmarks.zoo.families import IMAGES, MicroBatch
from benchmarks.zoo.scenario import ONSET, control
from benchmarks.zoo.training import ZooRun

Sample = Callable[[Generator, int], MicroBatch]


def _some(run: ZooRun, step: int, like: Tensor, share: float) -> Tensor:
    """True in a random share of the positions."""
    return torch.rand(like.shape, generator=step_rng(run, step)) < share


def _cut(batch: MicroBatch, length: int) -> MicroBatch:
    """Only the first tokens or time steps of each sequence."""
    extra = None if batch.extra is None else batch.extra[:, :length]
    return MicroBatch(batch.x[:, :length], batch.y[:, :length], extra)


def _pick(batch: MicroBatch, mask: Tensor) -> MicroBatch:
    """A batch of the same size from the samples that fit; in rare seeds none does, and the batch stays as it is."""
    rows = mask.nonzero().flatten()
    if not len(rows):
        return batch
    rows = rows[torch.arange(len(mask)) % len(rows)]
    return MicroBatch(batch.x[rows], batch.y[rows])


# -- batches


@control("decoder", "vision_language", onset=0, samples=1)
def tiny_batches(run: ZooRun, at: int) -> None:
    """One sample a batch, because no more fits into memory."""


@control("convolution", "residual")
def batch_size_change(run: ZooRun, at: int) -> None:
    """The batch becomes a quarter as large, on purpose."""
    fewer_samples = run.samples // 4
    run.on_batch(lambda step, batch: batch.head(fewer_samples) if step >= at else batch)


@control("plain", "autoencoder", accumulate=8)
def accumulation_change(run: ZooRun, at: int) -> None:
    """Eight micro-batches an update become one, on purpose."""

    def change(step: int) -> None:
        run.accumulate = 1 if step >= at else run.settings.accumulate

    run.before_step(change)


@control("decoder", "encoder", onset=0)
def nearly_empty_batches(run: ZooRun, at: int) -> None:
    """One batch in thirteen is padding but for two tokens."""

    def empty(step: int, batch: MicroBatch) -> MicroBatch:
        if step % 13:
            return batch
        y = torch.full_like(batch.y, -100)
        y[:2, 5] = batch.y[:2, 5]
        return batch.replace(y=y)

    run.on_batch(empty)


# -- data


@control("convolution", "residual", onset=0)
def curriculum(run: ZooRun, at: int) -> None:
    """Clean images first, noisy ones from the middle of the run on."""

    def clear(step: int, batch: MicroBatch) -> MicroBatch:
        clean = IMAGES[batch.y, : batch.x.shape[1]]
        return batch if step >= at + ONSET else batch.replace(x=0.3 * batch.x + 0.7 * clean)

    run.on_batch(clear)


@control("decoder", "encoder", onset=0)
def rare_hard_batches(run: ZooRun, at: int) -> None:
    """One batch in 29 is gibberish, as in any large corpus."""

    def gibberish(step: int, batch: MicroBatch) -> MicroBatch:
        order = torch.randperm(batch.y.numel(), generator=step_rng(run, step))
        return batch.replace(y=batch.y.flatten()[order].view_as(batch.y)) if step % 29 == 28 else batch

    run.on_batch(gibberish)


@control("plain", "memory", onset=0)
def rare_noisy_batches(run: ZooRun, at: int) -> None:
    """One batch in 23 comes from a bad sensor: its labels are right only on average."""
    run.on_batch(
        lambda step, batch: batch.replace(y=batch.y + 2 * step_normal(run, step, batch.y)) if step % 23 == 22 else batch
    )


@control("recurrent", "memory")
def spike_that_heals(run: ZooRun, at: int) -> None:
    """One recording is five times as loud as all others, labels and all."""
    run.on_batch(lambda step, batch: batch.replace(x=batch.x * 5, y=batch.y * 5) if step == at else batch)


@control("decoder", "vision_language", onset=0)
def label_noise(run: ZooRun, at: int) -> None:
    """Six labels in ten are random."""

    def wrong(step: int, batch: MicroBatch) -> MicroBatch:
        rng = step_rng(run, step)
        chance = torch.rand(batch.y.shape, generator=rng) < 0.6
        return batch.replace(y=torch.randint(0, 16, batch.y.shape, generator=rng).where(chance, batch.y))

    run.on_batch(wrong)


@control("plain", "memory", onset=0, clip=1.0, optimizer=torch.optim.Adamax, lr=5e-3)
def heavy_tailed_labels(run: ZooRun, at: int) -> None:
    """Labels have a heavy tail, as prices do: now and then one is far out."""

    def tail(step: int, batch: MicroBatch) -> MicroBatch:
        a, b, c = torch.randn(3, *batch.y.shape, generator=step_rng(run, step))
        return batch.replace(y=batch.y + 0.3 * a / (b.square() + c.square()).sqrt())

    run.on_batch(tail)


@control("convolution", "residual", onset=0)
def class_imbalance(run: ZooRun, at: int) -> None:
    """Half of the classes appear only in every twelfth batch."""
    run.on_batch(lambda step, batch: _pick(batch, batch.y < 5) if step % 12 else _pick(batch, batch.y >= 5))


@control("convolution", "residual", onset=0)
def new_class(run: ZooRun, at: int) -> None:
    """Three classes appear for the first time in the middle of the run."""
    run.on_batch(lambda step, batch: batch if step >= at + ONSET else _pick(batch, batch.y < 7))


@control("decoder", "vision_language")
def second_source(run: ZooRun, at: int) -> None:
    """Every other batch is in a second language, which the model has yet to learn."""

    def translate(step: int, batch: MicroBatch) -> MicroBatch:
        if step < at or step % 2 == 0:
            return batch
        if batch.extra is None:
            return MicroBatch(23 - batch.x, 23 - batch.y)
        return MicroBatch(batch.x, 15 - batch.y, 15 - batch.extra)

    run.on_batch(translate)


@control("convolution", "residual")
def augmentation_on(run: ZooRun, at: int) -> None:
    """Images lose a patch and get random contrast from the middle of the run on."""

    def augment(step: int, batch: MicroBatch) -> MicroBatch:
        if step < at:
            return batch
        x = batch.x * step_normal(run, step, batch.x[:, :1, :1, :1]).exp()
        x[:, :, step % 8 : step % 8 + 5, step % 7 : step % 7 + 5] = 0
        return batch.replace(x=x)

    run.on_batch(augment)


@control("recurrent", "autoencoder", onset=0)
def augmentation_off(run: ZooRun, at: int) -> None:
    """Heavy noise on the inputs is switched off in the middle of the run."""
    run.on_batch(
        lambda step, batch: batch if step >= at + ONSET else batch.replace(x=batch.x + step_normal(run, step, batch.x))
    )


@control("recurrent", "autoencoder", onset=0, optimizer=torch.optim.Adagrad, lr=0.03)
def masked_inputs(run: ZooRun, at: int) -> None:
    """Three inputs in four are missing: most of the input is zero."""

    def masked(rng: Generator, samples: int, sample: Sample = run.family.sample) -> MicroBatch:
        batch = sample(rng, samples)
        return batch.replace(x=batch.x * (torch.rand(batch.x.shape, generator=rng) < 0.25))

    run.family = replace(run.family, sample=masked)


@control("plain", "autoencoder", onset=0, clip=1.0)
def outliers(run: ZooRun, at: int) -> None:
    """One input in two thousand is 100; the loop clips and copes."""
    run.on_batch(lambda step, batch: batch.replace(x=batch.x.masked_fill(_some(run, step, batch.x, 0.0005), 100.0)))


@control("plain", "encoder", onset=0)
def easy_task(run: ZooRun, at: int) -> None:
    """The task can be solved exactly: loss and norms fall by orders of magnitude."""

    def easy(rng: Generator, samples: int, sample: Sample = run.family.sample) -> MicroBatch:
        batch = sample(rng, samples)
        return batch.replace(y=batch.x[:, :4] if batch.extra is None else (batch.x % 8).where(batch.extra, -100))

    run.family = replace(run.family, sample=easy)


# -- sequences


@control("decoder", "memory", onset=0)
def longer_sequences(run: ZooRun, at: int) -> None:
    """Sequences of four first, whole ones from the middle of the run on."""
    run.on_batch(lambda step, batch: batch if step >= at + ONSET else _cut(batch, 4))


@control("recurrent", "encoder")
def shorter_sequences(run: ZooRun, at: int) -> None:
    """Sequences become a third as long, on purpose."""
    run.on_batch(lambda step, batch: _cut(batch, batch.y.shape[1] // 3) if step >= at else batch)

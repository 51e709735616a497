"""From the data section of a recipe to batches: the one door of this room for the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.data.held_out import EvalLoader
from surefoot.data.parts import build_language_datasets, wrap_user_dataset
from surefoot.data.problem import DataError, UnreadableSample, check_unreadable
from surefoot.data.sampler import Sampler
from surefoot.data.sound import ReplaceUnreadable, ReportingCollate, TrainLoader, UnreadableLog
from surefoot.data.spec import DataSpec
from surefoot.data.store import TokenStore
from surefoot.data.token_files import find_token_outside
from surefoot.data.tokenizers import Tokenizer
from surefoot.data.windows import LanguageDataset


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Data that is ready: loaders of this rank, and what is known about it.

    `train` goes on exactly where it was (`state_dict`), `held_out` gives the same batches in every loop, as many on
    each rank. `hash` names the content, see `surefoot.data.fingerprint`; None when only a dataset was handed in.
    """

    train_loader: TrainLoader
    eval_loader: EvalLoader | None
    vocab: int | None
    tokenizer: Tokenizer | None
    hash: str | None
    samples: int
    """To train on, over all ranks."""
    tokens: int | None
    """To be told in an epoch, over all ranks."""
    notes: list[str]
    """For the user to know."""
    store: TokenStore | None
    """Files of tokens, about which nobody knows what is in them."""

    @property
    def unreadable(self) -> list[UnreadableSample]:
        """What could not be read so far: at the opening everywhere, since then on this rank."""
        return self.train_loader.record.samples


def open_data(
    spec: DataSpec,
    *,
    seed: int,
    rank: int = 0,
    world: int = 1,
    batch_size: int,
    pin_memory: bool = False,
    segments: bool = False,
    dataset: Any = None,
    eval_dataset: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    cache: Path | None = None,
) -> TrainingData:
    """Everything a run reads, checked; raises `DataError`, one message with the way out, before anything long begins.

    A batch of a language model is a dict: `inputs` and `targets`, int64 [batch, context], `count`, the number of
    targets that are not -100, and with `segments` the number of the text in its sample, -1 for padding, where no target
    crosses into another text. Packed samples all have one shape, so the last batch of an epoch is left out when it is
    not full, unless it is the only one.

    With kind own `dataset` (a length, samples by number), `held_out` and `collate` are the user's own. `cache` is where
    texts are kept as tokens.
    """
    parts = (
        wrap_user_dataset(spec, dataset, eval_dataset, collate)
        if spec.kind == "own"
        else build_language_datasets(spec, segments, cache)
    )
    check_unreadable(parts.report.unreadable, spec.bad_samples)
    language = isinstance(parts.train, LanguageDataset)
    shaped = language and (spec.packing and len(parts.train) >= batch_size * world)
    try:
        sampler = Sampler(
            parts.train, batch_size, seed=seed, shuffle=spec.shuffle, drop_last=shaped, rank=rank, world_size=world
        )
    except ValueError as error:
        raise DataError(str(error)) from None
    collated, record = ReportingCollate(parts.collate), UnreadableLog(spec.bad_samples, parts.report.unreadable)
    train = TrainLoader(
        ReplaceUnreadable(parts.train),
        sampler,
        record,
        num_workers=spec.workers,
        collate_fn=collated,
        pin_memory=pin_memory,
        persistent_workers=spec.workers > 0,
        prefetch_factor=spec.prefetch if spec.workers else None,
    )
    held = None
    if parts.eval is not None and len(parts.eval):
        held = EvalLoader(
            ReplaceUnreadable(parts.eval), collated, record, batch_size=batch_size, rank=rank, world=world
        )
    return TrainingData(
        train_loader=train,
        eval_loader=held,
        vocab=parts.vocab,
        tokenizer=parts.tokenizer,
        hash=parts.hash,
        samples=len(parts.train),
        tokens=parts.train.tokens if language else None,
        notes=parts.report.notes,
        store=parts.store,
    )


def check_vocab(opened: TrainingData, vocab: int) -> None:
    """Refuse data with tokens that the model has no place for, before the first step.

    Where a tokenizer is known it says so at once. Files of tokens are looked at in a thousand places; from then on each
    sample is checked when it is read, and one with such a token counts as unreadable.
    """
    if opened.tokenizer is not None and opened.tokenizer.vocab > vocab:
        raise DataError(
            f"the tokenizer has {opened.tokenizer.vocab} tokens and the model's vocabulary {vocab}: give the model at "
            f"least {opened.tokenizer.vocab}"
        )
    if opened.store is None:
        return
    if (found := find_token_outside(opened.store.tokens, vocab)) is not None:
        place, token = found
        raise DataError(
            f"the data has token {token}, at place {place}, and the model's vocabulary {vocab}: give the model more, "
            "or check data.dtype and data.path"
        )
    opened.train_loader.set_vocab(vocab)
    if opened.eval_loader is not None:
        opened.eval_loader.set_vocab(vocab)

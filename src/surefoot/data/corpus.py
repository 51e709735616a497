"""From the data section of a recipe to batches: the one door of this room for the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.data.held_out import HeldOut
from surefoot.data.parts import language_parts, own_parts
from surefoot.data.problem import DataError, Unreadable, check_few
from surefoot.data.sampler import Sampler
from surefoot.data.sound import Collated, Record, Sound, SoundLoader
from surefoot.data.spec import DataSpec
from surefoot.data.store import Store
from surefoot.data.token_files import outside
from surefoot.data.tokenizers import Tokenizer
from surefoot.data.windows import LanguageData


@dataclass(frozen=True, slots=True)
class Opened:
    """Data that is ready: loaders of this rank, and what is known about it.

    `train` goes on exactly where it was (`state_dict`), `held_out` gives the same batches in every loop, as many on
    each rank. `hash` names the content, see `surefoot.data.fingerprint`; None when only a dataset was handed in.
    """

    train: SoundLoader
    held_out: HeldOut | None
    vocab: int | None
    tokenizer: Tokenizer | None
    hash: str | None
    samples: int
    """To train on, over all ranks."""
    tokens: int | None
    """To be told in an epoch, over all ranks."""
    notes: list[str]
    """For the user to know."""
    store: Store | None
    """Files of tokens, about which nobody knows what is in them."""

    @property
    def bad(self) -> list[Unreadable]:
        """What could not be read so far: at the opening everywhere, since then on this rank."""
        return self.train.record.bad


def open_data(
    spec: DataSpec,
    *,
    seed: int,
    rank: int = 0,
    world: int = 1,
    batch_size: int,
    pin: bool = False,
    segments: bool = False,
    dataset: Any = None,
    held_out: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    cache: Path | None = None,
) -> Opened:
    """Everything a run reads, checked; raises `DataError`, one message with the way out, before anything long begins.

    A batch of a language model is a dict: `inputs` and `targets`, int64 [batch, context], `count`, the number of
    targets that are not -100, and with `segments` the number of the text in its sample, -1 for padding, where no target
    crosses into another text. Packed samples all have one shape, so the last batch of an epoch is left out when it is
    not full, unless it is the only one.

    With kind own `dataset` (a length, samples by number), `held_out` and `collate` are the user's own. `cache` is where
    texts are kept as tokens.
    """
    parts = own_parts(spec, dataset, held_out, collate) if spec.kind == "own" else language_parts(spec, segments, cache)
    check_few(parts.told.unreadable, spec.bad_samples)
    language = isinstance(parts.train, LanguageData)
    shaped = language and (spec.packing and len(parts.train) >= batch_size * world)
    try:
        sampler = Sampler(
            parts.train, batch_size, seed=seed, shuffle=spec.shuffle, drop_last=shaped, rank=rank, world_size=world
        )
    except ValueError as error:
        raise DataError(str(error)) from None
    collated, record = Collated(parts.collate), Record(spec.bad_samples, parts.told.unreadable)
    train = SoundLoader(
        Sound(parts.train),
        sampler,
        record,
        num_workers=spec.workers,
        collate_fn=collated,
        pin_memory=pin,
        persistent_workers=spec.workers > 0,
        prefetch_factor=spec.prefetch if spec.workers else None,
    )
    held = None
    if parts.held_out is not None and len(parts.held_out):
        held = HeldOut(Sound(parts.held_out), collated, record, batch_size=batch_size, rank=rank, world=world)
    return Opened(
        train=train,
        held_out=held,
        vocab=parts.vocab,
        tokenizer=parts.tokenizer,
        hash=parts.hash,
        samples=len(parts.train),
        tokens=parts.train.tokens if language else None,
        notes=parts.told.notes,
        store=parts.store,
    )


def check_vocab(opened: Opened, vocab: int) -> None:
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
    if (found := outside(opened.store.tokens, vocab)) is not None:
        place, token = found
        raise DataError(
            f"the data has token {token}, at place {place}, and the model's vocabulary {vocab}: give the model more, "
            "or check data.dtype and data.path"
        )
    opened.train.refuse_from(vocab)
    if opened.held_out is not None:
        opened.held_out.refuse_from(vocab)

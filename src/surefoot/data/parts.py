"""Samples to train on and samples held out, the same for every rank, with what is known about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.data.cutting import DatasetBuilder
from surefoot.data.held_out import choose_eval_samples
from surefoot.data.problem import DataError
from surefoot.data.sources import make_data_tokenizer, tokenize_source
from surefoot.data.spec import DataSpec
from surefoot.data.store import TokenStore
from surefoot.data.texts import ReadReport
from surefoot.data.tokenizers import Tokenizer
from surefoot.data.windows import collate_tokens


@dataclass(frozen=True, slots=True)
class Datasets:
    """See `surefoot.data.corpus.Opened` for what they mean."""

    train: Any
    eval: Any
    collate: Callable[[list[Any]], Any]
    report: ReadReport
    hash: str | None = None
    vocab: int | None = None
    tokenizer: Tokenizer | None = None
    store: TokenStore | None = None


def build_language_datasets(spec: DataSpec, segments: bool, cache: Path | None) -> Datasets:
    """Texts, files of tokens or conversations as samples for a language model."""
    if spec.kind == "tokens" and (segments or not spec.packing):
        raise DataError(
            "data.kind tokens knows no borders between texts: data.packing must be true, and a model that asks for "
            "segments cannot be trained on it. Use data.kind text."
        )
    tokenizer = make_data_tokenizer(spec)
    main = tokenize_source(spec, spec.path, "data.path", tokenizer, cache)
    told, name = ReadReport(list(main.report.unreadable), list(main.report.notes)), main.hash
    cutting = DatasetBuilder(spec.kind, spec.context, spec.packing, spec.limit, segments, told.notes)
    if spec.held_out_path:
        other = tokenize_source(spec, spec.held_out_path, "data.held_out_path", tokenizer, cache)
        told.unreadable += other.report.unreadable
        train, held, name = cutting.build(main.store), cutting.build(other.store), f"{name}, held out {other.hash}"
        if common := np.isin(other.store.digests, main.store.digests).sum() if spec.kind != "tokens" else 0:
            told.notes.append(f"{common} of {len(other.store.digests)} held-out texts are also trained on")
    else:
        train, held = cutting.build_split(main.store, spec.held_out)
    if not cutting.whole_texts and train.num_targets < spec.context:
        raise DataError(
            f"there are {train.num_targets + 1} tokens to train on, and one sample takes {spec.context + 1} (data.context "
            f"{spec.context} and the one after): add text, shorten data.context, or set data.packing to false"
        )
    return Datasets(
        train=train,
        eval=held,
        collate=partial(collate_tokens, width=spec.context if spec.packing else None, segments=segments),
        report=told,
        hash=name,
        vocab=tokenizer.vocab if tokenizer else spec.vocab,
        tokenizer=tokenizer,
        store=main.store if spec.kind == "tokens" else None,
    )


def wrap_user_dataset(
    spec: DataSpec, dataset: Any, held_out: Any, collate: Callable[[list[Any]], Any] | None
) -> Datasets:
    """A dataset of the user's own, a share of it held out when nothing else is."""
    from torch.utils.data import Subset, default_collate

    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"data.dataset made a {type(dataset).__name__}: expected a dataset with a length and samples by number, so "
            "that a run can go on exactly where it was"
        )
    told, name = ReadReport(), getattr(dataset, "_fingerprint", None)
    if held_out is None and len(dataset) > 1 and spec.held_out > 0:
        chosen = choose_eval_samples(len(dataset), spec.held_out)
        told.notes.append(f"{len(chosen)} of {len(dataset)} samples are held out")
        rest = np.setdiff1d(np.arange(len(dataset)), chosen)
        dataset, held_out = Subset(dataset, rest.tolist()), Subset(dataset, chosen.tolist())
    return Datasets(dataset, held_out, collate or default_collate, told, hash=name if isinstance(name, str) else None)

"""From the data section of a recipe to loaders: `open_data`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from surefoot.data.chat import make_chat_encoder, tokenize_chats
from surefoot.data.data_error import DataError, ReadReport, UnreadableSample, check_unreadable
from surefoot.data.language_dataset import DatasetBuilder, LanguageDataset, choose_eval_samples, collate_tokens
from surefoot.data.resilient_loaders import EvalLoader, ReplaceUnreadable, ReportingCollate, TrainLoader, UnreadableLog
from surefoot.data.sampler import Sampler
from surefoot.data.source_files import find_files, fingerprint_files
from surefoot.data.stdlib_corpus import library_files
from surefoot.data.text_files import tokenize_texts
from surefoot.data.token_cache import (
    TokenizeJob,
    default_cache_dir,
    show_progress,
    tokenize_cached,
    tokenize_in_memory,
)
from surefoot.data.token_store import TokenStore, TokenWriter, find_token_outside, open_token_files
from surefoot.data.tokenizers import ByteTokenizer, Tokenizer, make_tokenizer
from surefoot.data.worker_count import Workers, resolve_workers

_MAX_IN_MEMORY, _MAX_IN_MEMORY_BYTE_TOKENS = 1 << 18, 64 << 20
"""Bytes of text up to which each process tokenizes in memory; more for byte tokens, which are fast."""


class DataSpec(Protocol):
    """The data section of a recipe; `surefoot.train.recipe` documents the fields."""

    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> list[str]: ...
    @property
    def held_out_path(self) -> list[str]: ...
    @property
    def held_out(self) -> float: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def vocab(self) -> int | None: ...
    @property
    def context(self) -> int: ...
    @property
    def packing(self) -> bool: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def shuffle(self) -> bool: ...
    @property
    def workers(self) -> Workers: ...
    @property
    def prefetch(self) -> int: ...
    @property
    def bad_samples(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Opened data: the loaders of this rank, and facts about the data.

    `train_loader` resumes exactly where it stopped (`state_dict`), `eval_loader` yields the same batches in every loop,
    equally many on each rank. `hash` identifies the content, see `fingerprint_files`; None for a user's dataset.
    """

    train_loader: TrainLoader
    eval_loader: EvalLoader | None
    vocab: int | None
    tokenizer: Tokenizer | None
    hash: str | None
    samples: int
    """Training samples, over all ranks."""
    tokens: int | None
    """Target tokens per epoch, over all ranks."""
    notes: list[str]
    """For the user."""
    store: TokenStore | None
    """Set for files of tokens, whose vocabulary is unknown until they are checked."""

    @property
    def unreadable(self) -> list[UnreadableSample]:
        """Unreadable samples so far: found while opening, and since then on this rank."""
        return self.train_loader.unreadable_log.samples


def open_data(
    spec: DataSpec,
    *,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int,
    pin_memory: bool = False,
    segments: bool = False,
    dataset: Any = None,
    eval_dataset: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    cache: Path | None = None,
) -> TrainingData:
    """Open and check all data of a run; raises `DataError` with the way out before anything long begins.

    A batch of a language model is a dict: `inputs` and `targets`, int64 [batch, context], `count`, the number of
    targets that are not -100, and with `segments` the number of the text in its sample, -1 for padding, where no target
    crosses into another text. Packed samples all have one shape, so the last batch of an epoch is dropped when it is
    not full, unless it is the only one.

    With kind own, `dataset` (with `__len__` and `__getitem__`), `eval_dataset` and `collate` are the user's. `cache` is
    the folder for tokenized texts.
    """
    if spec.kind == "own":
        datasets = _wrap_user_dataset(spec, dataset, eval_dataset, collate)
    else:
        datasets = _build_language_datasets(spec, segments, cache)
    check_unreadable(datasets.report.unreadable, spec.bad_samples)
    is_language = isinstance(datasets.train, LanguageDataset)
    drop_last = is_language and (spec.packing and len(datasets.train) >= batch_size * world_size)
    try:
        sampler = Sampler(
            datasets.train,
            batch_size,
            seed=seed,
            shuffle=spec.shuffle,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
    except ValueError as error:
        raise DataError(str(error)) from None
    workers = resolve_workers(spec.workers, cheap=is_language)
    collate_fn = ReportingCollate(datasets.collate)
    unreadable_log = UnreadableLog(spec.bad_samples, datasets.report.unreadable)
    train_loader = TrainLoader(
        ReplaceUnreadable(datasets.train),
        sampler,
        unreadable_log,
        num_workers=workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
        prefetch_factor=spec.prefetch if workers else None,
    )
    eval_loader = None
    if datasets.eval is not None and len(datasets.eval):
        eval_loader = EvalLoader(
            ReplaceUnreadable(datasets.eval),
            collate_fn,
            unreadable_log,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
        )
    return TrainingData(
        train_loader=train_loader,
        eval_loader=eval_loader,
        vocab=datasets.vocab,
        tokenizer=datasets.tokenizer,
        hash=datasets.hash,
        samples=len(datasets.train),
        tokens=datasets.train.num_targets if is_language else None,
        notes=datasets.report.notes,
        store=datasets.store,
    )


def check_vocab(data: TrainingData, vocab: int) -> None:
    """Raise DataError for tokens beyond the model's vocabulary, before the first step.

    With a tokenizer its size decides. Files of tokens are checked in a thousand spans; after that each sample is
    checked when it is read, and one with such a token counts as unreadable.
    """
    if data.tokenizer is not None and data.tokenizer.vocab > vocab:
        raise DataError(
            f"the tokenizer has {data.tokenizer.vocab} tokens and the model's vocabulary {vocab}: give the model at "
            f"least {data.tokenizer.vocab}"
        )
    if data.store is None:
        return
    if (outside := find_token_outside(data.store.tokens, vocab)) is not None:
        position, token = outside
        raise DataError(
            f"the data has token {token} at position {position}, and the model's vocabulary is {vocab}: raise it, or "
            "check data.dtype and data.path"
        )
    data.train_loader.set_vocab(vocab)
    if data.eval_loader is not None:
        data.eval_loader.set_vocab(vocab)


@dataclass(frozen=True, slots=True)
class _Datasets:
    """Training and eval dataset, the same on every rank; see `TrainingData` for the other fields."""

    train: Any
    eval: Any
    collate: Callable[[list[Any]], Any]
    report: ReadReport
    hash: str | None = None
    vocab: int | None = None
    tokenizer: Tokenizer | None = None
    store: TokenStore | None = None


def _build_language_datasets(spec: DataSpec, segments: bool, cache: Path | None) -> _Datasets:
    """Texts, files of tokens or conversations as samples for a language model."""
    if spec.kind == "tokens" and (segments or not spec.packing):
        raise DataError(
            "data.kind tokens has no boundaries between texts: data.packing must be true, and a model that needs "
            "segments cannot be trained on it. Use data.kind text."
        )
    tokenizer = _make_tokenizer(spec)
    train_files = _tokenize_files(spec, spec.path, "data.path", tokenizer, cache)
    report = ReadReport(list(train_files.report.unreadable), list(train_files.report.notes))
    content_hash = train_files.hash
    builder = DatasetBuilder(spec.kind, spec.context, spec.packing, spec.limit, segments, report.notes)
    if spec.held_out_path:
        eval_files = _tokenize_files(spec, spec.held_out_path, "data.held_out_path", tokenizer, cache)
        report.unreadable += eval_files.report.unreadable
        train, held_out = builder.build(train_files.store), builder.build(eval_files.store)
        content_hash = f"{content_hash}, held out {eval_files.hash}"
        digests = eval_files.store.digests
        if common := np.isin(digests, train_files.store.digests).sum() if spec.kind != "tokens" else 0:
            report.notes.append(f"{common} of {len(digests)} held-out texts are also in the training data")
    else:
        train, held_out = builder.build_split(train_files.store, spec.held_out)
    if not builder.whole_texts and train.num_targets < spec.context:
        raise DataError(
            f"there are {train.num_targets + 1} tokens to train on, and one sample takes {spec.context + 1} "
            f"(data.context {spec.context} plus one): add text, shorten data.context, or set data.packing to false"
        )
    return _Datasets(
        train=train,
        eval=held_out,
        collate=partial(collate_tokens, width=spec.context if spec.packing else None, segments=segments),
        report=report,
        hash=content_hash,
        vocab=tokenizer.vocab if tokenizer else spec.vocab,
        tokenizer=tokenizer,
        store=train_files.store if spec.kind == "tokens" else None,
    )


def _wrap_user_dataset(
    spec: DataSpec, dataset: Any, eval_dataset: Any, collate: Callable[[list[Any]], Any] | None
) -> _Datasets:
    """A user's dataset, a fraction of it held out when no eval dataset is given."""
    from torch.utils.data import Subset, default_collate

    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"data.dataset made a {type(dataset).__name__}: expected a dataset with __len__ and __getitem__, so that a "
            "run can resume exactly where it stopped"
        )
    report, content_hash = ReadReport(), getattr(dataset, "_fingerprint", None)
    if eval_dataset is None and len(dataset) > 1 and spec.held_out > 0:
        chosen = choose_eval_samples(len(dataset), spec.held_out)
        report.notes.append(f"{len(chosen)} of {len(dataset)} samples are held out")
        rest = np.setdiff1d(np.arange(len(dataset)), chosen)
        dataset, eval_dataset = Subset(dataset, rest.tolist()), Subset(dataset, chosen.tolist())
    return _Datasets(
        dataset,
        eval_dataset,
        collate or default_collate,
        report,
        hash=content_hash if isinstance(content_hash, str) else None,
    )


@dataclass(frozen=True, slots=True)
class _TokenizedFiles:
    store: TokenStore
    hash: str
    report: ReadReport


def _make_tokenizer(spec: DataSpec) -> Tokenizer | None:
    """None for files of tokens whose tokenizer is not given."""
    if spec.kind == "tokens" and spec.tokenizer == "bytes" and spec.dtype != "uint8":
        return None
    return make_tokenizer(spec.tokenizer)


def _tokenize_files(
    spec: DataSpec, patterns: Sequence[str], setting: str, tokenizer: Tokenizer | None, cache: Path | None
) -> _TokenizedFiles:
    """Find the files of `patterns` and tokenize them, checking them before anything long begins."""
    if spec.kind == "library":
        if patterns:
            raise DataError(
                f"data.kind library is Python's standard library and takes no {setting}: remove it, or use kind text"
            )
        files = library_files()
    else:
        files = find_files(spec.kind, patterns, setting=setting)
    content_hash = fingerprint_files(files)
    if tokenizer is None or spec.kind == "tokens":
        return _TokenizedFiles(open_token_files(files, spec.dtype), content_hash, ReadReport())
    store, report = _tokenize(spec, files, content_hash, tokenizer, cache)
    if not len(store.digests):
        bad = report.unreadable
        first = f"; the first of {len(bad)} unreadable: {bad[0]}" if bad else ""
        raise DataError(f"{setting}: there is no {spec.kind} in {', '.join(patterns)[:200]}{first}")
    return _TokenizedFiles(store, content_hash, report)


def _tokenize(
    spec: DataSpec, files: list[Path], content_hash: str, tokenizer: Tokenizer, cache: Path | None
) -> tuple[TokenStore, ReadReport]:
    size, limit, is_chat = sum(path.stat().st_size for path in files), spec.limit, spec.kind == "chat"
    amount = size if is_chat else min(size, limit or size)
    template, encode = make_chat_encoder(tokenizer) if is_chat else ("", None)

    def write(writer: TokenWriter) -> ReadReport:
        with show_progress(amount, "tokenizing") as advance:
            if encode is not None:
                return tokenize_chats(files, encode, limit, spec.bad_samples, writer, advance)
            return tokenize_texts(files, tokenizer, limit, spec.bad_samples, writer, advance)

    cache_key = "\0".join([spec.kind, content_hash, tokenizer.identity, str(limit), template])
    job = TokenizeJob(cache_key, tokenizer.vocab, has_loss_mask=is_chat, write=write, files=files)
    max_in_memory = _MAX_IN_MEMORY_BYTE_TOKENS if isinstance(tokenizer, ByteTokenizer) else _MAX_IN_MEMORY
    return tokenize_in_memory(job) if amount <= max_in_memory else tokenize_cached(job, cache or default_cache_dir())

"""Samples for a language model: windows over a token stream, or whole texts, one or several per sample."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from surefoot.data.data_error import DataError
from surefoot.data.epoch_order import EpochOrder, Indices
from surefoot.data.token_store import IntArray, TokenStore

IGNORE_INDEX = -100
"""The target that torch's cross entropy ignores."""
EVAL_SEED = 0x48454C44
"""The eval split is the same for every seed of a run, so that runs can be compared."""


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Consecutive tokens: each but the last is an input, each but the first a target."""

    tokens: IntArray
    loss_mask: IntArray | None = None
    """0 for tokens that are not to be learned."""
    segments: IntArray | None = None
    """The number of the text that a token belongs to, from 0 in each sample."""


class LanguageDataset(Dataset[TokenSample]):
    """Base of the two ways to cut samples."""

    vocab: int | None = None
    """A sample with a token from here on raises ValueError; set before workers start."""
    num_targets: int
    """Target tokens in one epoch, over all samples."""

    def __init__(self, store: TokenStore, *, segments: bool) -> None:
        self._store, self._segments = store, segments

    def source_of(self, index: int) -> str:
        """File and line of the texts in a sample."""
        return self._store.source_of(self._spans_of(index))

    def _spans_of(self, index: int) -> list[tuple[int, int]]:
        """The (first, count) spans of the store that a sample is made of."""
        raise NotImplementedError

    def _read(self, spans: list[tuple[int, int]], segments: IntArray | None) -> TokenSample:
        """The concatenated tokens of several (first, count) spans."""
        tokens = _concatenated([self._store.tokens.read(*span) for span in spans]).astype(np.int64)
        if self.vocab is not None and len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab:
            outside = tokens[(tokens < 0) | (tokens >= self.vocab)][0]
            raise ValueError(f"token {outside} is beyond the model's vocabulary of {self.vocab}")
        mask = self._store.loss_mask
        loss_mask = None if mask is None else _concatenated([mask.read(*span) for span in spans])
        return TokenSample(tokens, loss_mask, segments)


def _concatenated(arrays: list[IntArray]) -> IntArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class StreamDataset(LanguageDataset):
    """Windows over all texts in a row: `context` input tokens and as many targets, shifted by one.

    Window i begins at token i x context, so each token but the first is a target exactly once per epoch. The last
    window may be shorter; it is padded with ignored targets.
    """

    def __init__(self, store: TokenStore, spans: Indices, context: int, *, segments: bool = False) -> None:
        """`spans` is [n, 2]: the (start, end) ranges of the store that make up the stream."""
        super().__init__(store, segments=segments)
        self._context = context
        gaps = np.flatnonzero(spans[1:, 0] != spans[:-1, 1]) + 1
        first, last = np.r_[0, gaps], np.r_[gaps - 1, len(spans) - 1]
        self._runs = np.stack([spans[first, 0], spans[last, 1]], 1)
        self._starts = np.r_[0, np.cumsum(self._runs[:, 1] - self._runs[:, 0])]
        self._text_starts = np.r_[0, np.cumsum(spans[:, 1] - spans[:, 0])] if segments else None
        self.num_targets = max(0, int(self._starts[-1]) - 1)

    def __len__(self) -> int:
        return (self.num_targets + self._context - 1) // self._context

    def __getitem__(self, index: int) -> TokenSample:
        first = index * self._context
        count = min(self._context + 1, self.num_targets + 1 - first)
        segments = None
        if self._text_starts is not None:
            texts = np.searchsorted(self._text_starts, np.arange(first, first + count), side="right")
            segments = texts - texts[0]
        return self._read(self._spans(first, count), segments)

    def _spans_of(self, index: int) -> list[tuple[int, int]]:
        first = index * self._context
        return self._spans(first, min(self._context + 1, self.num_targets + 1 - first))

    def _spans(self, first: int, count: int) -> list[tuple[int, int]]:
        spans, run = [], int(np.searchsorted(self._starts, first, side="right")) - 1
        while count > 0:
            inside = min(count, int(self._starts[run + 1]) - first)
            spans.append((int(self._runs[run, 0]) + first - int(self._starts[run]), inside))
            first, count, run = first + inside, count - inside, run + 1
        return spans


class TextDataset(LanguageDataset):
    """Whole texts, one per sample or with `pack` as many as fit; texts longer than a sample are truncated."""

    def __init__(
        self, store: TokenStore, texts: Indices, context: int, *, pack: bool = False, segments: bool = False
    ) -> None:
        super().__init__(store, segments=segments)
        self._firsts = store.offsets[texts]
        self._counts = np.minimum(store.lengths[texts], context + 1)
        self._groups = pack_lengths(self._counts.tolist(), context + 1) if pack else None
        self.num_targets = int(self._counts.sum()) - len(self)

    def __len__(self) -> int:
        return len(self._firsts) if self._groups is None else len(self._groups)

    def __getitem__(self, index: int) -> TokenSample:
        spans = self._spans_of(index)
        segments = np.repeat(np.arange(len(spans)), [count for _, count in spans]) if self._segments else None
        return self._read(spans, segments)

    def _spans_of(self, index: int) -> list[tuple[int, int]]:
        group = [index] if self._groups is None else self._groups[index]
        return [(int(self._firsts[i]), int(self._counts[i])) for i in group]


def pack_lengths(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing: each index goes to the fullest group that still has room, longest first."""
    groups: list[list[int]] = []
    open_groups: list[tuple[int, int]] = []
    """Room left and number of each group, sorted."""
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(open_groups, (lengths[i], 0))
        room, number = open_groups.pop(at) if at < len(open_groups) else (capacity, len(groups))
        if number == len(groups):
            groups.append([])
        groups[number].append(i)
        if room > lengths[i] + 1:
            insort(open_groups, (room - lengths[i], number))
    return groups


def collate_tokens(samples: list[TokenSample], *, width: int | None, segments: bool) -> dict[str, Any]:
    """A batch of inputs, targets and the count of targets; `width` tokens wide, or as wide as the longest sample."""
    import torch

    width = width or max(len(sample.tokens) for sample in samples) - 1
    inputs = np.zeros((len(samples), width), np.int64)
    targets = np.full((len(samples), width), IGNORE_INDEX, np.int64)
    segment_ids = np.full((len(samples), width), -1, np.int64)
    for row, sample in enumerate(samples):
        n = len(sample.tokens) - 1
        inputs[row, :n], targets[row, :n] = sample.tokens[:-1], sample.tokens[1:]
        if sample.loss_mask is not None:
            targets[row, :n][sample.loss_mask[1:] == 0] = IGNORE_INDEX
        if sample.segments is not None:
            segment_ids[row, :n] = sample.segments[:-1]
            targets[row, :n][np.diff(sample.segments) != 0] = IGNORE_INDEX
    batch: dict[str, Any] = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
    batch["count"] = int((targets != IGNORE_INDEX).sum())
    return {**batch, "segments": torch.from_numpy(segment_ids)} if segments else batch


def choose_eval_texts(digests: NDArray[np.uint64], lengths: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """True for texts of the eval split: about a `fraction` of the tokens; equal texts stay on the same side.

    The choice depends on the content of the texts, not on names or order. At least one text is chosen, the shortest if
    none is short enough, and never all: with a single text, or copies of one, none.
    """
    if fraction <= 0 or not len(digests):
        return np.zeros(len(digests), bool)
    groups, member = np.unique(digests, return_inverse=True)
    sizes = np.bincount(member, weights=lengths).astype(np.int64)
    if len(groups) < 2:
        return np.zeros(len(digests), bool)
    left, chosen = fraction * int(sizes.sum()), np.zeros(len(groups), bool)
    for group, size in enumerate(sizes.tolist()):
        if size <= left:
            chosen[group], left = True, left - size
    if not chosen.any() or chosen.all():
        chosen[:] = False
        chosen[int(sizes.argmin())] = True
    return chosen[member]


def choose_eval_samples(length: int, fraction: float) -> Indices:
    """The sample indices of the eval split of any dataset."""
    count = min(max(1, round(length * fraction)), length - 1) if fraction > 0 else 0
    return np.sort(EpochOrder(length, seed=EVAL_SEED, epoch=0, shuffle=True).samples(np.arange(count)))


@dataclass(frozen=True, slots=True)
class DatasetBuilder:
    """Builds datasets from a token store: windows over a stream, or whole texts, and the split into train and eval."""

    kind: str
    context: int
    packing: bool
    limit: int | None
    segments: bool
    notes: list[str] = field(default_factory=list)

    @property
    def whole_texts(self) -> bool:
        """Conversations are never cut in two to fill a sample, running text is."""
        return self.kind == "chat" or not self.packing

    @property
    def packs_texts(self) -> bool:
        return self.kind == "chat" and self.packing

    def build(self, store: TokenStore) -> LanguageDataset:
        """One dataset of everything in the store."""
        if self.kind == "tokens":
            return self._split_tail(store, 0)[0]
        return self._texts(store, self._usable(store)) if self.whole_texts else self._stream(store, _text_spans(store))

    def build_split(self, store: TokenStore, fraction: float) -> tuple[LanguageDataset, LanguageDataset | None]:
        """Training and eval dataset; no text, and no copy of one, is in both."""
        if self.kind == "tokens":
            return self._split_tail(store, fraction)
        usable = self._usable(store) if self.whole_texts else np.arange(len(store.digests))
        chosen = choose_eval_texts(store.digests[usable], store.lengths[usable], fraction)
        if fraction > 0 and not chosen.any():
            if not self.whole_texts:
                self.notes.append(f"there is only one text: its last {fraction:.1%} is held out")
                return self._split_tail(store, fraction)
            self.notes.append("there is only one text: nothing is held out")
        train, held_out = usable[~chosen], usable[chosen]
        if len(held_out):
            tokens = store.lengths[held_out].sum() / store.lengths[usable].sum()
            self.notes.append(f"{len(held_out)} of {len(usable)} texts are held out, {tokens:.1%} of the tokens")
        if self.whole_texts:
            return self._texts(store, train), self._texts(store, held_out) if len(held_out) else None
        spans = _text_spans(store)
        return self._stream(store, spans[train]), self._stream(store, spans[held_out]) if len(held_out) else None

    def _split_tail(self, store: TokenStore, fraction: float) -> tuple[LanguageDataset, LanguageDataset | None]:
        end = len(store.tokens) if self.kind != "tokens" or self.limit is None else min(len(store.tokens), self.limit)
        cut = end - round(end * fraction)
        held_out = self._stream(store, np.array([[cut, end]])) if end - cut > 1 else None
        return self._stream(store, np.array([[0, cut]])), held_out

    def _stream(self, store: TokenStore, spans: Indices) -> StreamDataset:
        return StreamDataset(store, spans, self.context, segments=self.segments)

    def _texts(self, store: TokenStore, texts: Indices) -> TextDataset:
        return TextDataset(store, texts, self.context, pack=self.packs_texts, segments=self.segments)

    def _usable(self, store: TokenStore) -> Indices:
        """Texts with at least one target within the context; notes say how many were truncated or skipped."""
        lengths, max_tokens = store.lengths, self.context + 1
        keep, long = lengths > 1, lengths > max_tokens
        if store.loss_mask is not None:
            for i in np.flatnonzero(long).tolist():
                keep[i] = store.loss_mask.read(int(store.offsets[i]), max_tokens)[1:].any()
        truncated = long & keep
        if truncated.any():
            lost = (lengths[truncated] - max_tokens).sum() / lengths.sum()
            self.notes.append(
                f"{truncated.sum()} of {len(lengths)} texts are longer than data.context {self.context} and were "
                f"truncated: {lost:.1%} of all tokens are lost"
            )
        if not keep.all():
            reason = "their targets lie beyond data.context, or they are shorter than two tokens"
            self.notes.append(f"{(~keep).sum()} of {len(lengths)} texts were skipped: {reason}")
        if not keep.any():
            raise DataError(
                f"none of {len(lengths)} texts can be used: each is shorter than two tokens, or its targets lie beyond "
                f"data.context {self.context}; raise it, or add text"
            )
        return np.flatnonzero(keep)


def _text_spans(store: TokenStore) -> Indices:
    return np.stack([store.offsets[:-1], store.offsets[1:]], 1)

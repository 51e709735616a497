"""Samples for a language model: windows over a stream of texts, or whole texts, one or several to a sample."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from surefoot.data.store import IntArray, TokenStore

Places = NDArray[np.int64]
IGNORED = -100
"""What torch's cross entropy passes over."""


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Tokens in a row, of which each but the last is read and each but the first is to be told."""

    tokens: IntArray
    loss_mask: IntArray | None = None
    """0 for tokens that are not to be learned."""
    segments: IntArray | None = None
    """The number of the text that a token belongs to, from 0 in each sample."""


class LanguageDataset(Dataset[TokenSample]):
    """What the ways to cut samples have in common."""

    vocab: int | None = None
    """Tokens from here on are refused, one sample at a time; set before workers start."""
    num_targets: int
    """To be told in one epoch, over all samples."""

    def __init__(self, store: TokenStore, *, segments: bool) -> None:
        self._store, self._segments = store, segments

    def _read(self, spans: list[tuple[int, int]], segments: IntArray | None) -> TokenSample:
        """The tokens of some (first, count), joined."""
        tokens = _joined([self._store.tokens.read(*span) for span in spans]).astype(np.int64)
        if self.vocab is not None and len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab:
            wrong = tokens[(tokens < 0) | (tokens >= self.vocab)][0]
            raise ValueError(f"token {wrong} is beyond the model's vocabulary of {self.vocab}")
        marks = self._store.loss_mask
        counted = None if marks is None else _joined([marks.read(*span) for span in spans])
        return TokenSample(tokens, counted, segments)


def _joined(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class StreamDataset(LanguageDataset):
    """Windows over the texts in a row: `context` tokens to read and the same number to tell, one further on.

    Window i begins at token i x context, so each token but the first is told exactly once an epoch. The last window
    may be shorter; it is filled up with what does not count.
    """

    def __init__(self, store: TokenStore, spans: Places, context: int, *, segments: bool = False) -> None:
        """`spans` is [n, 2]: parts of the store, from and to, that make up the stream."""
        super().__init__(store, segments=segments)
        self._context = context
        self._texts = spans
        joins = np.flatnonzero(spans[1:, 0] != spans[:-1, 1]) + 1
        first, last = np.r_[0, joins], np.r_[joins - 1, len(spans) - 1]
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
            found = np.searchsorted(self._text_starts, np.arange(first, first + count), side="right")
            segments = found - found[0]
        return self._read(self._spans(first, count), segments)

    def _spans(self, first: int, count: int) -> list[tuple[int, int]]:
        found, run = [], int(np.searchsorted(self._starts, first, side="right")) - 1
        while count > 0:
            inside = min(count, int(self._starts[run + 1]) - first)
            found.append((int(self._runs[run, 0]) + first - int(self._starts[run]), inside))
            first, count, run = first + inside, count - inside, run + 1
        return found


class TextDataset(LanguageDataset):
    """Whole texts, in groups that fit into a sample; what is longer than one was cut to it."""

    def __init__(
        self, store: TokenStore, texts: Places, context: int, *, pack: bool = False, segments: bool = False
    ) -> None:
        super().__init__(store, segments=segments)
        self._firsts = store.offsets[texts]
        self._counts = np.minimum(store.lengths[texts], context + 1)
        self._groups = pack_lengths(self._counts.tolist(), context + 1) if pack else None
        self.num_targets = int(self._counts.sum()) - len(self)

    def __len__(self) -> int:
        return len(self._firsts) if self._groups is None else len(self._groups)

    def __getitem__(self, index: int) -> TokenSample:
        group = [index] if self._groups is None else self._groups[index]
        spans = [(int(self._firsts[i]), int(self._counts[i])) for i in group]
        segments = np.repeat(np.arange(len(group)), [count for _, count in spans]) if self._segments else None
        return self._read(spans, segments)


def pack_lengths(lengths: list[int], room: int) -> list[list[int]]:
    """Put each in the fullest group that still has room for it, the longest first: little room stays empty."""
    groups: list[list[int]] = []
    open_: list[tuple[int, int]] = []
    """Room left and number of each group, sorted."""
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(open_, (lengths[i], 0))
        left, number = open_.pop(at) if at < len(open_) else (room, len(groups))
        if number == len(groups):
            groups.append([])
        groups[number].append(i)
        if left > lengths[i] + 1:
            insort(open_, (left - lengths[i], number))
    return groups


def collate_tokens(samples: list[TokenSample], *, width: int | None, segments: bool) -> dict[str, Any]:
    """Inputs, targets and how many of them count; `width` tokens, or as many as the longest sample needs."""
    import torch

    width = width or max(len(sample.tokens) for sample in samples) - 1
    inputs = np.zeros((len(samples), width), np.int64)
    targets = np.full((len(samples), width), IGNORED, np.int64)
    parts = np.full((len(samples), width), -1, np.int64)
    for row, sample in enumerate(samples):
        n = len(sample.tokens) - 1
        inputs[row, :n], targets[row, :n] = sample.tokens[:-1], sample.tokens[1:]
        if sample.loss_mask is not None:
            targets[row, :n][sample.loss_mask[1:] == 0] = IGNORED
        if sample.segments is not None:
            parts[row, :n] = sample.segments[:-1]
            targets[row, :n][np.diff(sample.segments) != 0] = IGNORED
    batch: dict[str, Any] = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
    batch["count"] = int((targets != IGNORED).sum())
    return {**batch, "segments": torch.from_numpy(parts)} if segments else batch

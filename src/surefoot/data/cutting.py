"""How texts are cut into samples, and parted into those to train on and those held out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from surefoot.data.held_out import choose_eval_texts
from surefoot.data.problem import DataError
from surefoot.data.store import TokenStore
from surefoot.data.windows import LanguageDataset, StreamDataset, TextDataset

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DatasetBuilder:
    """Into windows over everything, or into whole texts: one a sample, or `together` as many as fit."""

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
        if self.kind == "tokens":
            return self._tail(store, 0)[0]
        return self._texts(store, self._usable(store)) if self.whole_texts else self._stream(store, _spans(store))

    def build_split(self, store: TokenStore, share: float) -> tuple[LanguageDataset, LanguageDataset | None]:
        """What to train on and what to evaluate on: no text, and no copy of one, is on both sides."""
        if self.kind == "tokens":
            return self._tail(store, share)
        usable = self._usable(store) if self.whole_texts else np.arange(len(store.digests))
        chosen = choose_eval_texts(store.digests[usable], store.lengths[usable], share)
        if share > 0 and not chosen.any():
            if not self.whole_texts:
                self.notes.append(f"there is only one text: its last {share:.1%} is held out")
                return self._tail(store, share)
            self.notes.append("there is only one text: nothing is held out")
        train, held = usable[~chosen], usable[chosen]
        if len(held):
            part = store.lengths[held].sum() / store.lengths[usable].sum()
            self.notes.append(f"{len(held)} of {len(usable)} texts are held out, {part:.1%} of the tokens")
        if self.whole_texts:
            return self._texts(store, train), self._texts(store, held) if len(held) else None
        spans = _spans(store)
        return self._stream(store, spans[train]), self._stream(store, spans[held]) if len(held) else None

    def _tail(self, store: TokenStore, share: float) -> tuple[LanguageDataset, LanguageDataset | None]:
        end = len(store.tokens) if self.kind != "tokens" or self.limit is None else min(len(store.tokens), self.limit)
        cut = end - round(end * share)
        held = self._stream(store, np.array([[cut, end]])) if end - cut > 1 else None
        return self._stream(store, np.array([[0, cut]])), held

    def _stream(self, store: TokenStore, spans: Places) -> StreamDataset:
        return StreamDataset(store, spans, self.context, segments=self.segments)

    def _texts(self, store: TokenStore, texts: Places) -> TextDataset:
        return TextDataset(store, texts, self.context, pack=self.packs_texts, segments=self.segments)

    def _usable(self, store: TokenStore) -> Places:
        """Texts of which something can be learned; what is cut off or left out is said."""
        lengths, room = store.lengths, self.context + 1
        keep, long = lengths > 1, lengths > room
        if store.loss_mask is not None:
            for i in np.flatnonzero(long).tolist():
                keep[i] = store.loss_mask.read(int(store.offsets[i]), room)[1:].any()
        cut = long & keep
        if cut.any():
            lost = (lengths[cut] - room).sum() / lengths.sum()
            self.notes.append(
                f"{cut.sum()} of {len(lengths)} texts are longer than data.context {self.context} and were cut to it: "
                f"{lost:.1%} of all tokens are lost"
            )
        if not keep.all():
            why = "what counts lies beyond data.context, or they are shorter than two tokens"
            self.notes.append(f"{(~keep).sum()} of {len(lengths)} texts were left out: {why}")
        if not keep.any():
            raise DataError(
                f"no text can be used: of {len(lengths)} each is shorter than two tokens, or what is to be learned "
                f"lies beyond data.context {self.context}; raise it, or add text"
            )
        return np.flatnonzero(keep)


def _spans(store: TokenStore) -> Places:
    return np.stack([store.offsets[:-1], store.offsets[1:]], 1)

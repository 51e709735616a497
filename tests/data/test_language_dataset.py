"""Windows over text streams and packed texts: no token is lost or repeated."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.language_dataset import (
    StreamDataset,
    TextDataset,
    choose_eval_samples,
    choose_eval_texts,
    collate_tokens,
    pack_lengths,
)
from surefoot.data.token_store import MemoryTokens, TokenStore

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)


def store_of(lengths: list[int]) -> TokenStore:
    """Texts whose tokens are their positions in the store."""
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    return TokenStore(MemoryTokens(np.arange(offsets[-1])), offsets, np.arange(len(lengths), dtype=np.uint64))


@given(LENGTHS, st.integers(2, 9), st.data())
def test_stream_windows_have_each_token_as_target_once(lengths: list[int], context: int, data: st.DataObject) -> None:
    store = store_of(lengths)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    spans = np.stack([store.offsets[chosen], store.offsets[np.array(chosen) + 1]], 1)
    row = list(chain(*(range(first, last) for first, last in spans.tolist())))
    stream = StreamDataset(store, spans, context, segments=True)
    samples = [stream[i] for i in range(len(stream))]
    assert [token for sample in samples for token in sample.tokens[1:]] == row[1:]
    assert [token for sample in samples for token in sample.tokens[:-1]] == row[:-1]
    owner = np.searchsorted(store.offsets, row, side="right") - 1
    for i, sample in enumerate(samples):
        owners = owner[i * context : i * context + len(sample.tokens)]
        assert sample.segments is not None
        assert ((np.diff(owners) != 0) == (np.diff(sample.segments) != 0)).all()


@given(LENGTHS, st.integers(12, 30))
def test_packed_groups_fit_and_contain_each_text_once(lengths: list[int], room: int) -> None:
    groups = pack_lengths(lengths, room)
    assert sorted(chain(*groups)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= room for group in groups)
    assert sum(sum(lengths[i] for i in group) <= room / 2 for group in groups) <= 1  # else two would fit into one


def test_a_shorter_sample_is_padded_with_ignored_targets() -> None:
    store = store_of([3, 6])
    texts = TextDataset(store, np.array([0, 1]), context=10)
    batch = collate_tokens([texts[0], texts[1]], width=None, segments=False)
    assert batch["targets"].tolist() == [[1, 2, -100, -100, -100], [4, 5, 6, 7, 8]]
    assert batch["count"] == texts.num_targets == 7


@given(LENGTHS, st.floats(0.01, 0.9), st.integers(1, 5))
def test_copies_stay_together_and_both_splits_are_non_empty(lengths: list[int], share: float, kinds: int) -> None:
    digests = np.arange(len(lengths), dtype=np.uint64) % np.uint64(kinds)
    chosen = choose_eval_texts(digests, np.array(lengths), share)
    assert not set(digests[chosen].tolist()) & set(digests[~chosen].tolist())
    assert chosen.any() == (len(set(digests.tolist())) > 1)
    assert not chosen.all()


@pytest.mark.parametrize(("length", "share", "count"), [(100, 0.05, 5), (10, 0.01, 1), (2, 0.9, 1), (100, 0.0, 0)])
def test_eval_samples_are_a_fraction_of_all(length: int, share: float, count: int) -> None:
    chosen = choose_eval_samples(length, share)
    assert len(set(chosen.tolist())) == count
    assert all(0 <= i < length for i in chosen)

from __future__ import annotations

import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch

from surefoot.data import batches, split, standard_library


@pytest.fixture(scope="module")
def corpus() -> torch.Tensor:
    return standard_library(200_000)


def test_the_corpus_is_python_source(corpus: torch.Tensor) -> None:
    text = bytes(corpus.tolist())
    assert corpus.dtype == torch.uint8
    assert len(text) == 200_000
    assert text.count(b"def ") > 50
    assert text.count(b"import ") > 20


def test_a_longer_corpus_begins_with_the_shorter_one(corpus: torch.Tensor) -> None:
    assert torch.equal(standard_library(300_000)[:200_000], corpus)


def test_a_python_without_library_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"found no \.py file"):
        standard_library()


def test_split_keeps_every_byte_in_place(corpus: torch.Tensor) -> None:
    train, validation = split(corpus, held_out=0.25)
    assert len(validation) == 50_000
    assert torch.equal(torch.cat((train, validation)), corpus)
    with pytest.raises(ValueError, match="between 0 and 1"):
        split(corpus, held_out=1.5)


def test_batches_are_windows_of_the_corpus(corpus: torch.Tensor) -> None:
    text = bytes(corpus.tolist())
    tokens = next(batches(corpus, batch=4, context=32, seed=0))
    assert tokens.shape == (4, 33)
    assert tokens.dtype == torch.int64
    assert all(bytes(row) in text for row in tokens.tolist())


def test_batches_depend_on_seed_and_step_alone(corpus: torch.Tensor) -> None:
    first = list(islice(batches(corpus, batch=4, context=32, seed=0), 6))
    again = list(islice(batches(corpus, batch=4, context=32, seed=0), 6))
    resumed = list(islice(batches(corpus, batch=4, context=32, seed=0, start=3), 3))
    other = next(batches(corpus, batch=4, context=32, seed=1))
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first[3:], resumed))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other)


def test_the_last_byte_can_be_drawn() -> None:
    corpus = torch.arange(5, dtype=torch.uint8)
    assert next(batches(corpus, batch=2, context=4, seed=0)).tolist() == [[0, 1, 2, 3, 4]] * 2
    with pytest.raises(ValueError, match="shorten the context"):
        batches(corpus, batch=2, context=5, seed=0)

"""Byte and Hugging Face tokenizers with their settings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torchdata")
pytest.importorskip("tokenizers")
sys.path.insert(0, str(Path(__file__).parent))
from corpora import opened, write_texts, write_tokenizer

from surefoot.data.data_error import DataError
from surefoot.data.tokenizers import make_tokenizer


@pytest.mark.parametrize("text", ["the user says", "Grüße, 世界 🙂", ""])
@pytest.mark.parametrize("kind", ["bytes", "folder", "file"])
def test_encode_decode_round_trip(tmp_path: Path, kind: str, text: str) -> None:
    folder = write_tokenizer(tmp_path)
    tokenizer = make_tokenizer({"bytes": "bytes", "folder": str(folder), "file": str(folder / "tokenizer.json")}[kind])
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < tokenizer.vocab for token in tokens)
    assert tokenizer.encode_many([text])[0].tolist() == tokens


def test_a_text_ends_with_the_tokenizers_end_token(tmp_path: Path) -> None:
    assert make_tokenizer(str(write_tokenizer(tmp_path / "a"))).end == 0
    named = write_tokenizer(tmp_path / "b", eos_token={"content": "<|im_end|>"})
    assert make_tokenizer(str(named)).end == 2


def test_tokenized_texts_decode_to_the_originals(tmp_path: Path) -> None:
    texts, folder = write_texts(tmp_path / "texts", 5), write_tokenizer(tmp_path / "tokenizer")
    data = opened(path=texts, tokenizer=str(folder), held_out=0, shuffle=False, batch_size=1000)
    assert data.tokenizer is not None
    (batch,) = data.train_loader
    first = batch["inputs"][0, :1].tolist()
    row = first + batch["targets"].flatten()[: batch["count"]].tolist()
    parts: list[list[int]] = [[]]
    for token in row:
        parts = [*parts, []] if token == data.tokenizer.end else [*parts[:-1], [*parts[-1], token]]
    assert [data.tokenizer.decode(part) for part in parts[:-1]] == [p.read_text() for p in sorted(texts.iterdir())]
    assert data.vocab == data.tokenizer.vocab > 256


def test_an_invalid_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match="the tokenizers package cannot read"):
        make_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="a folder that has one"):
        make_tokenizer(str(tmp_path / "missing"))

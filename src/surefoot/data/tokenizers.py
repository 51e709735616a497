"""Text to tokens and back: one token per byte, or a Hugging Face tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from surefoot.data.data_error import DataError
from surefoot.data.token_store import IntArray

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")
"""Usual names of the end-of-text token, tried when the tokenizer config has no eos_token."""


class Tokenizer(Protocol):
    """The interface that the rest of `data/` uses."""

    vocab: int
    end: int | None
    """The end-of-text token."""
    identity: str
    """Differs between tokenizers that give different tokens."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def encode_many(self, texts: Sequence[str]) -> list[IntArray]: ...


class ByteTokenizer:
    """Each UTF-8 byte is a token, 256 in all; texts end with byte 0, which occurs in no text."""

    vocab = 256
    end: int | None = 0
    identity = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def encode_many(self, texts: Sequence[str]) -> list[IntArray]:
        return [np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts]


class HuggingFaceTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` library; adds no special tokens except the end of a text."""

    def __init__(self, file: Path) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # set explicitly, else it warns when workers start
        import tokenizers

        try:
            self.inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"data.tokenizer: the tokenizers package cannot read {file}: {error}") from None
        self.inner.no_truncation()  # the file may set both, which would silently truncate or pad texts
        self.inner.no_padding()
        self.folder = file.parent
        vocab: dict[str, int] = self.inner.get_vocab(with_added_tokens=True)
        self.vocab = max(vocab.values(), default=0) + 1
        self.end = next((vocab[name] for name in (_configured_end(self.folder), *_END_TOKENS) if name in vocab), None)
        self.identity = xxhash.xxh3_128_hexdigest(file.read_bytes() + str(self.end).encode())

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode(list(tokens), skip_special_tokens=True)

    def encode_many(self, texts: Sequence[str]) -> list[IntArray]:
        encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]


def make_tokenizer(name: str) -> Tokenizer:
    """Make a tokenizer from `bytes`, a `tokenizer.json`, or a folder that has one."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"data.tokenizer: there is no file {file} (relative to {Path.cwd()}). Use bytes, a tokenizer.json, or "
            "a folder that has one (AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes it)."
        )
    try:
        return HuggingFaceTokenizer(file)
    except ImportError:
        raise DataError(f"data.tokenizer: {file} needs the package tokenizers: pip install tokenizers") from None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The `tokenizer_config.json` beside a tokenizer; empty when there is none."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _configured_end(folder: Path) -> str | None:
    end = read_tokenizer_config(folder).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None

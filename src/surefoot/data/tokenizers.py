"""Text to numbers and back: byte by byte, or with a tokenizer of Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from surefoot.data.problem import DataError
from surefoot.data.store import IntArray

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")
"""What an end of text is called when the tokenizer does not say."""


class Tokenizer(Protocol):
    """What the rest of `data/` needs to know."""

    vocab: int
    end: int | None
    """The token between two texts."""
    identity: str
    """Another one for every tokenizer that gives other numbers."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def encode_many(self, texts: Sequence[str]) -> list[IntArray]: ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token: 256 of them, no more; texts end with byte 0, which stands in no text."""

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
    """A `tokenizer.json`, by the library that made it; special tokens are not added but for the end of a text."""

    def __init__(self, file: Path) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # said aloud, it does not warn when workers start
        import tokenizers

        try:
            self.inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more particular
            raise DataError(f"data.tokenizer: {file} is no tokenizer that `tokenizers` can read: {error}") from None
        self.inner.no_truncation()  # both may be set in the file, and would cut or lengthen texts unseen
        self.inner.no_padding()
        self.folder = file.parent
        numbers: dict[str, int] = self.inner.get_vocab(with_added_tokens=True)
        self.vocab = max(numbers.values(), default=0) + 1
        self.end = next((numbers[name] for name in (_named_end(self.folder), *_ENDS) if name in numbers), None)
        self.identity = xxhash.xxh3_128_hexdigest(file.read_bytes() + str(self.end).encode())

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode(list(tokens), skip_special_tokens=True)

    def encode_many(self, texts: Sequence[str]) -> list[IntArray]:
        found = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in found]


def make_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or a `tokenizer.json`, or a folder that has one."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"data.tokenizer: there is no file {file}, looked for from {Path.cwd()}. Give bytes, a tokenizer.json, or "
            "a folder that has one (AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes it)."
        )
    try:
        return HuggingFaceTokenizer(file)
    except ImportError:
        raise DataError(f"data.tokenizer: {file} needs the package tokenizers: pip install tokenizers") from None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """What stands beside a tokenizer, in `tokenizer_config.json`; nothing when there is none."""
    try:
        told = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _named_end(folder: Path) -> str | None:
    end = read_tokenizer_config(folder).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None

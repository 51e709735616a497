"""How long texts are in tokens, measured with the recipe's tokenizer on a part of its texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from surefoot.data.source_files import find_files
from surefoot.data.stdlib_corpus import library_files
from surefoot.data.tokenizers import ByteTokenizer, Tokenizer, make_tokenizer
from surefoot.plan.page import PageSection
from surefoot.train.recipe import Recipe

_MAX_TEXTS, _MAX_CHARS = 400, 2_000_000
_QUICK, _QUICK_BYTE_TOKENS = 16 << 20, 256 << 20
"""Bytes of text that are tokenized in seconds."""


@dataclass(frozen=True, slots=True)
class TextLengths:
    """Lengths of a sample of texts."""

    texts: int
    characters: int
    tokens: int
    quantiles: tuple[int, int, int]
    """Tokens of the median text, and what 90 % and 99 % of the texts do not exceed."""
    longer: float
    """Share of the texts that are longer than the context."""
    bytes_read: int
    bytes_in_all: int = 0
    """Of all files."""
    is_quick: bool = True
    """Whether tokenizing all of them takes only seconds."""

    @property
    def tokens_in_all(self) -> float:
        return self.tokens / max(self.bytes_read, 1) * self.bytes_in_all


def measure_lengths(recipe: Recipe) -> TextLengths | None:
    """Measure a spread of the texts; None for data that is not text."""
    spec = recipe.data
    if spec.kind not in ("library", "text"):
        return None
    files = library_files() if spec.kind == "library" else find_files("text", spec.path)
    tokenizer = make_tokenizer(spec.tokenizer)
    lengths = lengths_of(list(_texts(files)), tokenizer, spec.context)
    if lengths is None:
        return None
    size = sum(path.stat().st_size for path in files)
    size = min(size, spec.limit or size)
    limit = _QUICK_BYTE_TOKENS if isinstance(tokenizer, ByteTokenizer) else _QUICK
    return replace(lengths, bytes_in_all=size, is_quick=size <= limit)


def lengths_of(texts: Sequence[str], tokenizer: Tokenizer, context: int) -> TextLengths | None:
    """The lengths of these texts."""
    texts = [text for text in texts if text]
    if not texts:
        return None
    tokens = np.array([len(encoded) for encoded in tokenizer.encode_many(texts)])
    low, high, highest = (int(value) for value in np.quantile(tokens, (0.5, 0.9, 0.99)))
    characters = sum(map(len, texts))
    size, longer = sum(len(text.encode(errors="replace")) for text in texts), float((tokens > context).mean())
    return TextLengths(len(texts), characters, int(tokens.sum()), (low, high, highest), longer, size)


def lengths_section(lengths: TextLengths, recipe: Recipe) -> PageSection:
    """The lengths as rows."""
    section = PageSection("texts", f"Texts, with the tokenizer {Path(recipe.data.tokenizer).name}")
    per_token = lengths.characters / max(lengths.tokens, 1)
    how = f"{lengths.characters:,} characters / {lengths.tokens:,} tokens of {lengths.texts} texts, measured"
    section.add("characters_per_token", "characters a token", per_token, f"{per_token:.3g}", how)
    median, most, nearly_all = lengths.quantiles
    section.add("median", "median text", median, f"{median:,}", "tokens, measured")
    section.add("p90", "90 % of texts", most, f"{most:,}", "tokens at most")
    section.add("p99", "99 % of texts", nearly_all, f"{nearly_all:,}", "tokens at most; long texts are read in part")
    context = recipe.data.context
    what = "continue in the next sample" if recipe.data.packing else "are cut"
    how = f"of the texts have more than data.context {context:,} tokens and {what}"
    section.add("longer", "longer texts", lengths.longer, f"{lengths.longer:.0%}", how)
    return section


def _texts(files: Sequence[Path]) -> Iterator[str]:
    """Texts spread over all files, whole where they are not too long."""
    chosen = files[:: max(1, len(files) // _MAX_TEXTS)]
    share = max(1, _MAX_CHARS // max(len(chosen), 1))
    for path in chosen:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                if path.suffix == ".jsonl":
                    yield from _lines(file.readlines(share))
                else:
                    yield file.read(max(share, 100_000))
        except OSError:
            continue  # opening the data reports what cannot be read


def _lines(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        try:
            text = json.loads(line).get("text")
        except (ValueError, AttributeError):
            continue
        if isinstance(text, str):
            yield text

"""From paths in a recipe to texts as tokens: found, named by their content, tokenized once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.data.cache import TokenizeJob, default_cache_dir, tokenize_cached, tokenize_in_memory
from surefoot.data.chat import make_chat_encoder, tokenize_chats
from surefoot.data.finding import find_files
from surefoot.data.fingerprint import fingerprint_files
from surefoot.data.problem import DataError
from surefoot.data.progress import progress
from surefoot.data.spec import DataSpec
from surefoot.data.store import TokenStore, TokenWriter
from surefoot.data.text import library_files
from surefoot.data.texts import ReadReport, tokenize_texts
from surefoot.data.token_files import open_token_files
from surefoot.data.tokenizers import ByteTokenizer, Tokenizer, make_tokenizer

_SMALL, _SMALL_BYTES = 1 << 18, 64 << 20
"""Bytes of text that each process tokenizes for itself, in memory; byte by byte that is quick for more."""


@dataclass(frozen=True, slots=True)
class TokenizedFiles:
    """One set of files as tokens."""

    store: TokenStore
    hash: str
    report: ReadReport


def make_data_tokenizer(spec: DataSpec) -> Tokenizer | None:
    """None for files of tokens when nobody says how they were made."""
    if spec.kind == "tokens" and spec.tokenizer == "bytes" and spec.dtype != "uint8":
        return None
    return make_tokenizer(spec.tokenizer)


def tokenize_source(
    spec: DataSpec, patterns: Sequence[str], setting: str, tokenizer: Tokenizer | None, cache: Path | None
) -> TokenizedFiles:
    """`patterns` as tokens; what is wrong with them is said before anything long begins."""
    if spec.kind == "library":
        if patterns:
            raise DataError(
                f"data.kind library is Python's own source and takes no {setting}: leave it out, or say text"
            )
        files = library_files()
    else:
        files = find_files(spec.kind, patterns, setting=setting)
    name = fingerprint_files(files)
    if tokenizer is None or spec.kind == "tokens":
        return TokenizedFiles(open_token_files(files, spec.dtype), name, ReadReport())
    store, told = _tokenized(spec, files, name, tokenizer, cache)
    if not len(store.digests):
        found = f"; the first of {len(told.unreadable)} unreadable: {told.unreadable[0]}" if told.unreadable else ""
        raise DataError(f"{setting}: there is no {spec.kind} in {', '.join(patterns)[:200]}{found}")
    return TokenizedFiles(store, name, told)


def _tokenized(
    spec: DataSpec, files: list[Path], name: str, tokenizer: Tokenizer, cache: Path | None
) -> tuple[TokenStore, ReadReport]:
    size, limit, chat = sum(path.stat().st_size for path in files), spec.limit, spec.kind == "chat"
    amount = size if chat else min(size, limit or size)
    template, encode = make_chat_encoder(tokenizer) if chat else ("", None)

    def write(writer: TokenWriter) -> ReadReport:
        with progress(amount, "tokenizing") as advance:
            if encode is not None:
                return tokenize_chats(files, encode, limit, spec.bad_samples, writer, advance)
            return tokenize_texts(files, tokenizer, limit, spec.bad_samples, writer, advance)

    made_of = [spec.kind, name, tokenizer.identity, str(limit), template]
    work = TokenizeJob("\0".join(made_of), tokenizer.vocab, has_loss_mask=chat, write=write)
    small = amount <= (_SMALL_BYTES if isinstance(tokenizer, ByteTokenizer) else _SMALL)
    return tokenize_in_memory(work) if small else tokenize_cached(work, cache or default_cache_dir())

"""Text files, each a document, or each line of a .jsonl a document, tokenized piece by piece, however large."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from surefoot.data.data_error import ReadReport, UnreadableSample, check_unreadable
from surefoot.data.token_cache import Advance
from surefoot.data.token_store import TokenWriter
from surefoot.data.tokenizers import Tokenizer

_PIECE_BYTES = 1 << 20
"""Bytes read at once. Longer texts are split at the end of a line, where most tokenizers start a new token anyway."""
_GROUP_CHARS = 8 << 20
"""Characters passed to the tokenizer at once: it processes the pieces on all cores."""
_MAX_INVALID_FRACTION = 0.001
"""A file with more invalid UTF-8 bytes than this is not text; one with fewer is read, and they are replaced."""


def tokenize_texts(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    limit: int | None,
    max_unreadable: int,
    writer: TokenWriter,
    advance: Advance,
) -> ReadReport:
    """Write all texts, each followed by the end-of-text token; `limit` bytes at most, the last text cut there.

    Stops with DataError once more than `max_unreadable` files are not text.
    """
    report = ReadReport()
    if tokenizer.end is None:
        report.notes.append("the tokenizer has no end-of-text token: texts follow each other without a separator")
    end = np.array([] if tokenizer.end is None else [tokenizer.end], np.int64)
    for group in _grouped(_pieces(files, limit, report)):
        encoded = iter(tokenizer.encode_many([piece for piece in group if isinstance(piece, str)]))
        for piece in group:
            if isinstance(piece, str):
                writer.add(next(encoded))
            elif piece.keep:
                writer.add(end)
                writer.end_text(piece.place)
            else:
                writer.drop_text()
        check_unreadable(report.unreadable, max_unreadable)
        advance(sum(len(piece) for piece in group if isinstance(piece, str)))
    return report


@dataclass(frozen=True, slots=True)
class _EndOfText:
    """Follows the last piece of a text."""

    keep: bool
    place: tuple[int, int] = (0, 0)
    """The number of the file, and the line of the text; 0 where the file is one text."""


class _NotText(ValueError):
    pass


@dataclass(slots=True)
class _Totals:
    size: int = 0
    empty: int = 0
    with_invalid_bytes: list[Path] = field(default_factory=list)


def _pieces(files: Sequence[Path], limit: int | None, report: ReadReport) -> Iterator[str | _EndOfText]:
    totals = _Totals()
    for number, path in enumerate(files):
        left = None if limit is None else limit - totals.size
        if left is not None and left <= 0:
            break
        read = _read_jsonl if path.suffix == ".jsonl" else _read_document
        for piece in read(path, left, totals, report):
            yield piece if isinstance(piece, str) else replace(piece, place=(number, piece.place[1]))
    if totals.empty:
        report.notes.append(f"{totals.empty} of {len(files)} files are empty")
    if totals.with_invalid_bytes:
        report.notes.append(
            f"{len(totals.with_invalid_bytes)} of {len(files)} texts have bytes that are not valid UTF-8, first "
            f"{totals.with_invalid_bytes[0]}: each such byte was replaced by U+FFFD"
        )


def _read_document(path: Path, limit: int | None, totals: _Totals, report: ReadReport) -> Iterator[str | _EndOfText]:
    """A file that is one text."""
    document = _Document(path, limit)
    try:
        yield from document
    except (OSError, _NotText) as error:
        report.unreadable.append(UnreadableSample(str(path), getattr(error, "strerror", None) or str(error)))
        yield _EndOfText(keep=False)
        return
    yield _EndOfText(keep=document.size > 0)
    totals.size += document.size
    totals.empty += document.size == 0
    totals.with_invalid_bytes += [path] if document.invalid else []


def _read_jsonl(path: Path, limit: int | None, totals: _Totals, report: ReadReport) -> Iterator[str | _EndOfText]:
    """A file with a text in each line, as `{"text": ...}`; the last one within the limit is not cut."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and limit <= 0:
                    return
                if not line.strip():
                    continue
                try:
                    text = _parse_text(line)
                except ValueError as error:
                    report.unreadable.append(UnreadableSample(f"{path} line {number}", str(error)))
                    continue
                size = len(text.encode())
                totals.size += size
                limit = None if limit is None else limit - size
                yield text
                yield _EndOfText(keep=size > 0, place=(0, number))
    except OSError as error:
        report.unreadable.append(UnreadableSample(str(path), error.strerror or str(error)))


def _parse_text(line: bytes) -> str:
    content = json.loads(line.decode("utf-8-sig"))
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, str):
        raise ValueError("expected an object with text; for conversations set data.kind to chat")
    text.encode()  # JSON can hold half of a surrogate pair, which is not valid text
    return text


class _Document:
    """Iterates over the pieces of one text file and counts its bytes and invalid bytes."""

    def __init__(self, path: Path, limit: int | None) -> None:
        self._path, self._limit = path, limit
        self.size = self.invalid = 0

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        with self._path.open("rb") as file:
            while data := self._cut(file.read(_PIECE_BYTES) + file.readline(_PIECE_BYTES)):
                if b"\0" in data:
                    offset = self.size + data.index(b"\0")
                    raise _NotText(f"not text: byte {offset} is zero, as in binary files and in UTF-16")
                self.size += len(data)
                text = decoder.decode(data)
                self.invalid += text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
                yield text
        rest = decoder.decode(b"", final=True)
        if self._limit is None or self.size < self._limit:  # else the limit cut a character in two
            self.invalid += len(rest)
            yield rest
        if self.invalid > _MAX_INVALID_FRACTION * self.size:
            raise _NotText(f"not UTF-8: {self.invalid} of {self.size} bytes are invalid; iconv -t utf-8 may convert it")

    def _cut(self, data: bytes) -> bytes:
        return data if self._limit is None else data[: max(0, self._limit - self.size)]


def _grouped(pieces: Iterable[str | _EndOfText]) -> Iterator[list[str | _EndOfText]]:
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += len(piece) if isinstance(piece, str) else 1
        if size >= _GROUP_CHARS:
            yield group
            group, size = [], 0
    yield group

"""Files of text, each a document, or each line of a .jsonl, turned into tokens piece by piece, however large."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from surefoot.data.problem import UnreadableSample, check_unreadable
from surefoot.data.progress import Advance
from surefoot.data.store import TokenWriter
from surefoot.data.tokenizers import Tokenizer

_PIECE = 1 << 20
"""Bytes read at once. Longer texts are cut at the end of a line, where most tokenizers begin anew anyway."""
_GROUP = 8 << 20
"""Characters handed to the tokenizer at once: it works on the pieces with all cores."""
_STRAY = 0.001
"""Up to this share of bytes that are no UTF-8 a file is a text with flaws, above it is no text."""


@dataclass(slots=True)
class ReadReport:
    """What came up on the way."""

    unreadable: list[UnreadableSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tokenize_texts(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    limit: int | None,
    max_unreadable: int,
    writer: TokenWriter,
    advance: Advance,
) -> ReadReport:
    """All the texts, each followed by the token for its end; `limit` bytes at most, the last text cut there.

    Once more than `most` files turned out to be no text, the rest is not looked at.
    """
    told = ReadReport()
    if tokenizer.end is None:
        told.notes.append("the tokenizer names no end of text: texts follow each other with nothing between them")
    end = np.array([] if tokenizer.end is None else [tokenizer.end], np.int64)
    for group in _grouped(_pieces(files, limit, told)):
        encoded = iter(tokenizer.encode_many([piece for piece in group if isinstance(piece, str)]))
        for piece in group:
            if isinstance(piece, str):
                writer.add(next(encoded))
            elif piece.kept:
                writer.add(end)
                writer.end_text()
            else:
                writer.drop_text()
        check_unreadable(told.unreadable, max_unreadable)
        advance(sum(len(piece) for piece in group if isinstance(piece, str)))
    return told


@dataclass(frozen=True, slots=True)
class _End:
    """After the last piece of a text: whether it is kept."""

    kept: bool


class _NotText(ValueError):
    pass


def _pieces(files: Sequence[Path], limit: int | None, told: ReadReport) -> Iterator[str | _End]:
    seen = _Seen()
    for path in files:
        left = None if limit is None else limit - seen.size
        if left is not None and left <= 0:
            break
        yield from (_lines if path.suffix == ".jsonl" else _whole)(path, left, seen, told)
    if seen.empty:
        told.notes.append(f"{seen.empty} of {len(files)} files are empty")
    if seen.flawed:
        told.notes.append(
            f"{len(seen.flawed)} of {len(files)} texts have bytes that are no UTF-8, the first is {seen.flawed[0]}: "
            "each such byte became the sign U+FFFD"
        )


@dataclass(slots=True)
class _Seen:
    size: int = 0
    empty: int = 0
    flawed: list[Path] = field(default_factory=list)


def _whole(path: Path, limit: int | None, seen: _Seen, told: ReadReport) -> Iterator[str | _End]:
    """A file that is one text."""
    reading = _Reading(path, limit)
    try:
        yield from reading
    except (OSError, _NotText) as error:
        told.unreadable.append(UnreadableSample(str(path), getattr(error, "strerror", None) or str(error)))
        yield _End(kept=False)
        return
    yield _End(kept=reading.size > 0)
    seen.size += reading.size
    seen.empty += reading.size == 0
    seen.flawed += [path] if reading.stray else []


def _lines(path: Path, limit: int | None, seen: _Seen, told: ReadReport) -> Iterator[str | _End]:
    """A file with a text in each line, as `{"text": ...}`; the last within the limit is not cut."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and limit <= 0:
                    return
                if not line.strip():
                    continue
                try:
                    text = _text_of(line)
                except ValueError as error:
                    told.unreadable.append(UnreadableSample(f"{path} line {number}", str(error)))
                    continue
                size = len(text.encode())
                seen.size += size
                limit = None if limit is None else limit - size
                yield text
                yield _End(kept=size > 0)
    except OSError as error:
        told.unreadable.append(UnreadableSample(str(path), error.strerror or str(error)))


def _text_of(line: bytes) -> str:
    found = json.loads(line.decode("utf-8-sig"))
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ValueError("expected an object with text; for conversations set data.kind to chat")
    text.encode()  # half of a surrogate pair can be written in JSON, but is no text
    return text


class _Reading:
    """One file, piece by piece, with what was seen in it."""

    def __init__(self, path: Path, limit: int | None) -> None:
        self._path, self._limit = path, limit
        self.size = self.stray = 0

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        with self._path.open("rb") as file:
            while data := self._cut(file.read(_PIECE) + file.readline(_PIECE)):
                if b"\0" in data:
                    place = self.size + data.index(b"\0")
                    raise _NotText(f"no text: byte {place} is zero, as in binary files and in UTF-16")
                self.size += len(data)
                text = decoder.decode(data)
                self.stray += text.count("\ufffd") - data.count(b"\xef\xbf\xbd")
                yield text
        rest = decoder.decode(b"", final=True)
        if self._limit is None or self.size < self._limit:  # else it is our own cut
            self.stray += len(rest)
            yield rest
        if self.stray > _STRAY * self.size:
            raise _NotText(f"no UTF-8: {self.stray} of {self.size} bytes make no sense; iconv -t utf-8 may convert it")

    def _cut(self, data: bytes) -> bytes:
        return data if self._limit is None else data[: max(0, self._limit - self.size)]


def _grouped(pieces: Iterable[str | _End]) -> Iterator[list[str | _End]]:
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += len(piece) if isinstance(piece, str) else 1
        if size >= _GROUP:
            yield group
            group, size = [], 0
    yield group

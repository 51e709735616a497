"""Decodes console output, strips terminal codes, and keeps the text since the last row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from surefoot.logs.formats.log_source import decode
from surefoot.logs.table import MAX_TAIL_CHARS

_ANSI_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_FULL_WIDTH = (("\uff1a", ": "), ("\uff0c", ", "), ("\uff1d", "="), ("\uff1b", "; "), ("\uff08", "("), ("\uff09", ")"))
"""Full-width punctuation of Chinese text, and its ASCII form."""
_BACKSPACES = re.compile("\x08+")
MAX_FIRST_CHARS = MAX_TAIL_CHARS // 4
_MAX_LINE_BYTES = 1 << 20
_CHINESE = re.compile("[\u4e00-\u9fff]")


def decode_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Decode bytes that are cut anywhere, in whole lines."""
    left = b""
    for chunk in chunks:
        chunk = left + chunk
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if len(chunk) - cut > _MAX_LINE_BYTES:
            cut = len(chunk)
        left = chunk[cut:]
        yield _decode_line_block(chunk[:cut])
    yield _decode_line_block(left)


def _decode_line_block(raw: bytes) -> str:
    """Decode as UTF-8, else as GB18030 if that gives Chinese, else as cp1252."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        pass
    try:
        text = raw.decode("gb18030")
    except UnicodeDecodeError:
        return decode(raw)
    wide = len(text) - len(text.encode("ascii", "ignore"))
    return text if wide and 2 * len(_CHINESE.findall(text)) > wide else decode(raw)


def strip_terminal_codes(text: str) -> str:
    """Strip colours, NUL bytes and overwriting: every state of a progress bar becomes a line."""
    if "\x1b" in text:
        text = _ANSI_CODES.sub("", text)
    if "\x00" in text:
        text = text.replace("\x00", "")
    if "\x08" in text:
        text = _BACKSPACES.sub("\n", text)
    if not text.isascii():
        for theirs, ours in _FULL_WIDTH:
            text = text.replace(theirs, ours)
    return text.replace("\r", "\n") if "\r" in text else text


class TextSinceRow:
    """The text since the last row: its beginning, where the first of many ranks fails, and its end."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._first: list[str] = []
        self._first_left = MAX_FIRST_CHARS
        self._last: list[str] = []
        self._size = 0
        self._was_cut = False

    def add(self, line: str) -> None:
        size = len(line) + 1
        if self._first_left > 0:
            self._first.append(line[: self._first_left])
            self._first_left -= size
            return
        self._last.append(line)
        self._size += size
        if self._size > 2 * MAX_TAIL_CHARS:
            self._last = [self._kept_tail()]
            self._size = len(self._last[0])
            self._was_cut = True

    def _kept_tail(self) -> str:
        return "\n".join(self._last)[-(MAX_TAIL_CHARS - MAX_FIRST_CHARS - 64) :]

    def text(self) -> str:
        first = "\n".join(self._first)
        last = self._kept_tail()
        return "\n".join(part for part in (first, last) if part)

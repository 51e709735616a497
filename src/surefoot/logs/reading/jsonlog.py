"""JSON: one record a line, or one document that holds the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from surefoot.logs.reading.gaps import resolve_missing
from surefoot.logs.reading.jsondocument import JsonDocument
from surefoot.logs.reading.jsonregular import parse_number_matrix
from surefoot.logs.reading.records import RecordBlock
from surefoot.logs.reading.source import LogSource, decode
from surefoot.logs.table import TableBuilder, LogTable, UnreadableInput

FORMAT = "jsonl"
_CLOSERS = {"{": "}", "[": "]"}
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', re.S)
_BARE = re.compile(r"(?<=[:,\[\s])([+-]?)(nan|inf(?:inity)?|none|true|false)(?=\s*[,}\]])", re.I)
_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*")', re.S)
_WORDS = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity", "none": "null", "true": "true", "false": "false"}
_STARTS = re.compile(rb"\s*[{\[]\s*(?:[\"{}\[\]\d.+-]|NaN|null|Infinity|true|false)")
_REPAIRED = 1 << 25
"""Characters up to which a document that is cut off is closed and read."""
_FAILURES = 300


def fits(head: bytes) -> bool:
    """JSON from the start, or lines most of which are JSON objects."""
    if _STARTS.match(head):
        first = head.lstrip()[:4096]
        # A console log may begin in a bracket too: [2024-01-01 10:00:00] loss 0.5
        return not first.startswith(b"[") or _like_a_list(decode(first))
    lines = [line.strip() for line in head.split(b"\n")]
    lines = [line for line in lines if line][:400]
    if len(head) > 1 << 15 and lines:
        lines = lines[:-1]
    objects = sum(line.startswith(b'{"') and line.endswith(b"}") for line in lines)
    return objects > 0 and objects >= 0.5 * len(lines)


def _like_a_list(text: str) -> bool:
    """Whether what stands in the first bracket is JSON: as far as it goes, or as far as it is."""
    try:
        json.JSONDecoder().raw_decode(_standard(text))
        return True
    except RecursionError:
        return False
    except ValueError:
        return bool(re.match(r'\[\s*(?:[{\[]\s*)?(?:"|[\d.eE+-]+\s*[,\]]|[}\]]|NaN|null|$)', text)) and _closes(text)


def _closes(text: str) -> bool:
    try:
        json.loads(_standard(close_json(text)))
        return True
    except (ValueError, RecursionError):
        return False


def read(source: LogSource) -> LogTable | list[LogTable]:
    """The records of a log, or of the document that it is."""
    blocks = source.blocks()
    start = next(blocks, b"")
    first, apart, second = start.lstrip(b"\0 \t\r\n").partition(b"\n")
    blocks = chain([start], blocks)
    if apart and second.strip() and (not first.startswith((b"{", b"[")) or _complete(first)):
        return _lines(source, blocks)
    return _document(source, blocks)


def _complete(line: bytes) -> bool:
    return isinstance(_loaded(decode(line)), dict)


def _lines(source: LogSource, blocks: Iterable[bytes]) -> LogTable:
    gatherer = TableBuilder()
    block = RecordBlock(gatherer)
    for raw in blocks:
        if (regular := parse_number_matrix(raw)) is not None:
            names, values = regular
            gatherer.extend(dict(zip(names, values.T, strict=True)), {})
            continue
        records = parse_lines_together(raw)
        block.add(parse_lines_singly(raw, gatherer) if records is None else records)
    if not gatherer.records:
        raise UnreadableInput(f"{source.path} looks like JSON lines, but none of its lines holds an object. {_WAY_OUT}")
    return resolve_missing(gatherer.build(FORMAT, source.path), gatherer.trailing_empty())


_WAY_OUT = "Write one object a line, such as " + '{"step": 1, "loss": 2.3}'


def parse_lines_together(raw: bytes) -> list[dict[str, Any]] | None:
    """All lines in one go, several times as fast as one by one; None where a single one is not what it should be."""
    lines = raw.removesuffix(b"\n")
    try:
        found = json.loads(b"[" + lines.replace(b"\n", b",") + b"]")
    except (ValueError, RecursionError):
        return None
    return found if len(found) == lines.count(b"\n") + 1 and set(map(type, found)) == {dict} else None


def parse_lines_singly(raw: bytes, gatherer: TableBuilder) -> list[dict[str, Any]]:
    """The records of each line; what is none is counted."""
    return [record for line in raw.splitlines(keepends=True) for record in _records_of(line, gatherer)]


def _records_of(line: bytes, gatherer: TableBuilder) -> Iterator[dict[str, Any]]:
    """The records in one line: mostly one; what is none is counted."""
    text = decode(line).strip().removeprefix("\ufeff").strip("\x1e\t ").rstrip(",")
    if not text or text in "[]":
        return
    value = _loaded(text)
    if isinstance(value, dict):
        yield value
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        yield from value
    elif value is None and (several := _several(text)):
        yield from several
    elif text.startswith("{") and not line.endswith(b"\n"):
        gatherer.skip("lines cut off in the middle")
    else:
        gatherer.skip("lines that are no JSON")


def _several(text: str) -> list[dict[str, Any]]:
    """Objects written one behind the other into a line."""
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    at = 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, dict):
            return []
        found.append(value)
        while at < len(text) and text[at] in " ,\t\r":
            at += 1
    return found


def _loaded(text: str) -> Any:
    """The value that a text holds, or None."""
    try:
        return json.loads(text)
    except RecursionError:
        return None
    except ValueError:
        if "\n" not in text and len(text) < 1 << 16 and _BARE.search(text):
            try:
                return json.loads(_standard(text))
            except (ValueError, RecursionError):
                return None
    return None


def _standard(text: str) -> str:
    """Words that C and Python print for numbers turned into those that JSON readers know; strings are left alone."""
    parts = _STRINGS.split(text)
    parts[::2] = [_BARE.sub(lambda found: found[1].strip("+") + _WORDS[found[2].lower()], part) for part in parts[::2]]
    return "".join(parts)


def _document(source: LogSource, blocks: Iterable[bytes]) -> LogTable | list[LogTable]:
    parts: list[bytes] = []
    for block in blocks:
        parts.append(block)
        source.check_size(sum(map(len, parts)))
    text = decode(b"".join(parts))
    del parts
    gatherer = TableBuilder()
    value = _understood(text, gatherer)
    del text
    document = JsonDocument(gatherer)
    table = gatherer.build(document.read(value), source.path)
    if not table.columns and not gatherer.trailing_empty():
        raise UnreadableInput(
            f"{source.path} is JSON, but holds no list of numbers and no records with numbers. {_WAY_OUT},"
            ' or a history such as {"loss": [2.3, 2.1]}'
        )
    return resolve_missing(table, gatherer.trailing_empty())


def _understood(text: str, gatherer: TableBuilder) -> Any:
    """The document; one that is cut off is closed where it stops, several in a row are a list."""
    try:
        return json.loads(text)
    except RecursionError:
        return None
    except ValueError:
        pass
    if len(text) < _REPAIRED:
        try:
            return json.loads(_standard(text))
        except (ValueError, RecursionError):
            pass
    rows = _scattered(text) or _lists(text)
    if len(text) < _REPAIRED and not _whole_objects(rows, text):
        try:
            value = json.loads(_standard(close_json(text)))
            gatherer.skip("documents cut off in the middle")
            return value
        except (ValueError, RecursionError):
            pass
    if not _whole_objects(rows, text) and not isinstance(rows[:1] and rows[0], list):
        gatherer.skip("pieces that are no JSON")
    return rows


def _lists(text: str) -> list[Any]:
    """A list a line, such as [step, loss]."""
    found = [value for value in map(_loaded, text.splitlines()) if isinstance(value, list)]
    return found if len(found) > 1 else []


def _whole_objects(rows: list[Any], text: str) -> bool:
    """Whether the text is objects one after the other, rather than one document that is broken."""
    decoder = json.JSONDecoder()
    try:
        value, _ = decoder.raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list) and bool(rows)


def _scattered(text: str) -> list[dict[str, Any]]:
    """Every object that can be read on its own, in order; gives up on a text that is hardly JSON."""
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    failures = 0
    at = text.find("{")
    while at >= 0 and failures < _FAILURES:
        try:
            value, at = decoder.raw_decode(text, at)
            found.append(value)
            at = text.find("{", at)
        except (ValueError, RecursionError):
            failures += 1
            at = text.find("{", at + 1)
    return found


def close_json(text: str) -> str:
    """A JSON text that stops in the middle, cut back to its last whole value and closed.

    >>> closed('{"a": [1, 2, {"b": 3}, {"c":')
    '{"a": [1, 2, {"b": 3}]}'
    """
    open_now: list[str] = []
    safe = 0
    stack: tuple[str, ...] = ()
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if sign in _CLOSERS:
            open_now.append(sign)
        elif sign in ("}", "]"):
            if not open_now or _CLOSERS[open_now.pop()] != sign:
                break
            safe, stack = token.end(), tuple(open_now[:40])
        elif sign == ",":
            safe, stack = token.start(), tuple(open_now[:40])
        if len(open_now) > 40:
            break
    return text[:safe] + "".join(_CLOSERS[sign] for sign in reversed(stack))

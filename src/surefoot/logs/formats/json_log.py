"""JSON logs: one record per line, or one document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.json_document import JsonDocument
from surefoot.logs.formats.json_records import RecordBlock
from surefoot.logs.formats.log_source import LogSource, decode
from surefoot.logs.formats.missing_values import resolve_missing
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable, TableBuilder

FORMAT = "jsonl"
_CLOSERS = {"{": "}", "[": "]"}
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', re.S)
_BARE_WORD = re.compile(r"(?<=[:,\[\s])([+-]?)(nan|inf(?:inity)?|none|true|false)(?=\s*[,}\]])", re.I)
_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*")', re.S)
_WORDS = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity", "none": "null", "true": "true", "false": "false"}
_JSON_START = re.compile(rb"\s*[{\[]\s*(?:[\"{}\[\]\d.+-]|NaN|null|Infinity|true|false)")
_MAX_REPAIRED_CHARS = 1 << 25
"""Larger truncated documents are not repaired."""
_MAX_FAILURES = 300


def fits(head: bytes) -> bool:
    """Whether the bytes start with JSON, or most lines are JSON objects."""
    if _JSON_START.match(head):
        first = head.lstrip()[:4096]
        # A console log may also start with a bracket: [2024-01-01 10:00:00] loss 0.5
        return not first.startswith(b"[") or _starts_json_list(decode(first))
    lines = [line.strip() for line in head.split(b"\n")]
    lines = [line for line in lines if line][:400]
    if len(head) > 1 << 15 and lines:
        lines = lines[:-1]
    objects = sum(line.startswith(b'{"') and line.endswith(b"}") for line in lines)
    return objects > 0 and objects >= 0.5 * len(lines)


def _starts_json_list(text: str) -> bool:
    """Whether the first bracket opens a JSON list, complete or cut off."""
    try:
        json.JSONDecoder().raw_decode(_standardise(text))
        return True
    except RecursionError:
        return False
    except ValueError:
        return bool(re.match(r'\[\s*(?:[{\[]\s*)?(?:"|[\d.eE+-]+\s*[,\]]|[}\]]|NaN|null|$)', text)) and _can_be_closed(
            text
        )


def _can_be_closed(text: str) -> bool:
    try:
        json.loads(_standardise(close_json(text)))
        return True
    except (ValueError, RecursionError):
        return False


def read(source: LogSource) -> LogTable | list[LogTable]:
    """Read JSON lines or a JSON document."""
    blocks = source.blocks()
    start = next(blocks, b"")
    first, apart, second = start.lstrip(b"\0 \t\r\n").partition(b"\n")
    blocks = chain([start], blocks)
    if apart and second.strip() and (not first.startswith((b"{", b"[")) or _is_object(first)):
        return _read_lines(source, blocks)
    return _read_document(source, blocks)


def _is_object(line: bytes) -> bool:
    return isinstance(_parse(decode(line)), dict)


def _read_lines(source: LogSource, blocks: Iterable[bytes]) -> LogTable:
    builder = TableBuilder()
    block = RecordBlock(builder)
    for raw in blocks:
        if (regular := parse_number_matrix(raw)) is not None:
            names, values = regular
            builder.extend(dict(zip(names, values.T, strict=True)), {})
            continue
        records = parse_lines_together(raw)
        block.add(parse_lines_singly(raw, builder) if records is None else records)
    if not builder.records:
        raise UnreadableInput(f"{source.path} looks like JSON lines, but no line contains an object. {_WAY_OUT}")
    return resolve_missing(builder.build(FORMAT, source.path), builder.trailing_empty())


_WAY_OUT = "Write one object a line, such as " + '{"step": 1, "loss": 2.3}'


def parse_lines_together(raw: bytes) -> list[dict[str, Any]] | None:
    """Parse all lines in one call, several times as fast as singly; None unless every line is an object."""
    lines = raw.removesuffix(b"\n")
    try:
        records = json.loads(b"[" + lines.replace(b"\n", b",") + b"]")
    except (ValueError, RecursionError):
        return None
    return records if len(records) == lines.count(b"\n") + 1 and set(map(type, records)) == {dict} else None


def parse_lines_singly(raw: bytes, builder: TableBuilder) -> list[dict[str, Any]]:
    """Parse each line; lines without a record are counted as skipped."""
    return [record for line in raw.splitlines(keepends=True) for record in _records_of(line, builder)]


def _records_of(line: bytes, builder: TableBuilder) -> Iterator[dict[str, Any]]:
    """The records in one line, usually one; a line without any is counted as skipped."""
    text = decode(line).strip().removeprefix("\ufeff").strip("\x1e\t ").rstrip(",")
    if not text or text in "[]":
        return
    value = _parse(text)
    if isinstance(value, dict):
        yield value
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        yield from value
    elif value is None and (several := _split_objects(text)):
        yield from several
    elif text.startswith("{") and not line.endswith(b"\n"):
        builder.skip("lines cut off in the middle")
    else:
        builder.skip("lines that are not JSON")


def _split_objects(text: str) -> list[dict[str, Any]]:
    """Several objects concatenated in one line."""
    decoder = json.JSONDecoder()
    records: list[dict[str, Any]] = []
    at = 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, dict):
            return []
        records.append(value)
        while at < len(text) and text[at] in " ,\t\r":
            at += 1
    return records


def _parse(text: str) -> Any:
    """Parse a JSON text; None if it is invalid."""
    try:
        return json.loads(text)
    except RecursionError:
        return None
    except ValueError:
        if "\n" not in text and len(text) < 1 << 16 and _BARE_WORD.search(text):
            try:
                return json.loads(_standardise(text))
            except (ValueError, RecursionError):
                return None
    return None


def _standardise(text: str) -> str:
    """Replace nan, inf, None etc. as printed by C and Python by their JSON forms; strings stay unchanged."""
    parts = _STRINGS.split(text)
    parts[::2] = [
        _BARE_WORD.sub(lambda match: match[1].strip("+") + _WORDS[match[2].lower()], part) for part in parts[::2]
    ]
    return "".join(parts)


def _read_document(source: LogSource, blocks: Iterable[bytes]) -> LogTable | list[LogTable]:
    parts: list[bytes] = []
    for block in blocks:
        parts.append(block)
        source.check_size(sum(map(len, parts)))
    text = decode(b"".join(parts))
    del parts
    builder = TableBuilder()
    value = _parse_document(text, builder)
    del text
    document = JsonDocument(builder)
    table = builder.build(document.read(value), source.path)
    if not table.columns and not builder.trailing_empty():
        raise UnreadableInput(
            f"{source.path} is JSON, but contains no list of numbers and no records with numbers. {_WAY_OUT},"
            ' or a history such as {"loss": [2.3, 2.1]}'
        )
    return resolve_missing(table, builder.trailing_empty())


def _parse_document(text: str, builder: TableBuilder) -> Any:
    """Parse a document; a truncated one is closed where it stops, several in a row become a list."""
    try:
        return json.loads(text)
    except RecursionError:
        return None
    except ValueError:
        pass
    if len(text) < _MAX_REPAIRED_CHARS:
        try:
            return json.loads(_standardise(text))
        except (ValueError, RecursionError):
            pass
    rows = _find_objects(text) or _parse_list_lines(text)
    if len(text) < _MAX_REPAIRED_CHARS and not _starts_with_object(rows, text):
        try:
            value = json.loads(_standardise(close_json(text)))
            builder.skip("documents cut off in the middle")
            return value
        except (ValueError, RecursionError):
            pass
    if not _starts_with_object(rows, text) and not isinstance(rows[:1] and rows[0], list):
        builder.skip("pieces that are not JSON")
    return rows


def _parse_list_lines(text: str) -> list[Any]:
    """One list per line, such as [step, loss]."""
    lists = [value for value in map(_parse, text.splitlines()) if isinstance(value, list)]
    return lists if len(lists) > 1 else []


def _starts_with_object(rows: list[Any], text: str) -> bool:
    """Whether the text is a sequence of objects rather than one broken document."""
    decoder = json.JSONDecoder()
    try:
        value, _ = decoder.raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list) and bool(rows)


def _find_objects(text: str) -> list[dict[str, Any]]:
    """All objects that can be parsed on their own; gives up on a text that is hardly JSON."""
    decoder = json.JSONDecoder()
    records: list[dict[str, Any]] = []
    failures = 0
    at = text.find("{")
    while at >= 0 and failures < _MAX_FAILURES:
        try:
            value, at = decoder.raw_decode(text, at)
            records.append(value)
            at = text.find("{", at)
        except (ValueError, RecursionError):
            failures += 1
            at = text.find("{", at + 1)
    return records


def close_json(text: str) -> str:
    """Cut a truncated JSON text back to its last complete value and close it.

    >>> close_json('{"a": [1, 2, {"b": 3}, {"c":')
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


_FIELD = re.compile(rb'[{,]\s*"(?:[^"\\]|\\.)*"\s*:')
_MAX_NAMES = 64
_FIRST_MARK = 0x80
"""Bytes from here on stand for the names; they cannot occur in ASCII."""
_NUMBER_BYTES = b"0123456789+-.eE \r" + b"NaInfity"


def parse_number_matrix(raw: bytes) -> tuple[list[str], NDArray[np.float64]] | None:
    """Names and values of lines that all have the same names and only numbers, without an object per line; else None.

    Every name is replaced by one byte; what is left without the numbers has to be the same for every line.
    """
    first = raw[: raw.find(b"\n")]
    names = _number_names(first) if raw.endswith(b"\n") and raw.isascii() else None
    signs = _FIELD.findall(first)
    if not names or len(names) != len(signs) or len(names) > _MAX_NAMES:
        return None
    text = raw
    for index, sign in enumerate(signs):
        text = text.replace(sign, bytes([_FIRST_MARK + index]))
    marks = bytes(range(_FIRST_MARK, _FIRST_MARK + len(names)))
    if text.translate(None, _NUMBER_BYTES) != (marks + b"}\n") * raw.count(b"\n"):
        return None
    plain = text.translate(bytes.maketrans(marks + b"}\r", b" " + b"," * (len(names) - 1) + b"  "))
    try:
        values = np.loadtxt(plain.decode("ascii").splitlines(), delimiter=",", comments=None, ndmin=2)
    except ValueError:
        return None
    return (names, values) if values.shape == (raw.count(b"\n"), len(names)) else None


def _number_names(line: bytes) -> list[str] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not {type(value) for value in record.values()} <= {int, float}:
        return None
    names = [name.strip() for name in record]
    return names if len(set(names)) == len(names) and "train_runtime" not in names else None

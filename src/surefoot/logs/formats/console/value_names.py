"""Finds the name of a number on a console line in the words around it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from surefoot.logs.formats.metric_names import MetricRole, parse_metric_name, split_words

_NAME_END = re.compile(r"(?:[:=]+>?|->|→|\bis|\bwas|\bof)\s*$")
_WRAPPER = re.compile(r"(?:\b(?:tensor|array|np\.\w+|numpy\.\w+|float\d*|jnp\.\w+|Array|DeviceArray)\(?\[*)\s*$")
_DELIMITER = re.compile(
    "[,;|(){}\\[\\]<>\t\x1f«»、。【】│┃║]|\\s[-\u2013\u2014•*]+\\s|\\s{2,}|[:=]|\\.\\s|\\s->\\s|→|±|\\+/-|\\bwith\\b|\\band\\b"
)
_UNIT = re.compile(
    r"^\s*(?:ms|s|secs?|seconds?|mins?|minutes?|hours?|h|[KMGT]i?B|B|it/s|s/it|%|(?:tokens?|tok|samples?|steps?|images?)/s"
    r"(?:ec)?|ms/step|s/step|个?)(?=\s|$)"
)
_PARENTHESIS = re.compile(r"^(.*?)\s*[(]([^()]*)[)]$", re.S)
_TABLE_CELL = re.compile(r"^\s*[|│┃]\s*([A-Za-z][^|│┃\x1f]{0,60}?)\s*[|│┃]\s*$")
_NAME_BEHIND = re.compile(r"^\s+([A-Za-z][A-Za-z_]*(?: [a-z_]+){0,2})\s*(?:[,;|]|$)")
_LEADING_JUNK = re.compile(r"^[^A-Za-z一-鿿]+")
_PROSE_WORD = re.compile(
    r"(?i)\b(?:improved|decreased|increased|from|than|did|reached|version|best|lowest|highest|minimum|target|previous|"
    r"threshold|max|limit|until|over|under|expected|to|old|weight|coef|lambda|patience|port|pid|seed|eta|ip|uid)\b"
)
_PREPOSITIONS = frozenset(
    {"at", "for", "on", "after", "in", "during", "finished", "completed", "done", "end", "of", "the", "to"}
)
_PHASE = re.compile(
    r"(?i)(?<![a-z_])(?:(val|valid|validation|validating|validate|eval|evaluation|evaluating|evaluate|test|testing|dev|"
    r"saving dict for)|(train|training|trn))(?![a-z_])|(验证|测试|评估)|(训练)"
)
MAX_NAME_CHARS = 64
_LOG_LEVELS = frozenset({"INFO", "DEBUG", "WARNING", "WARN", "CRITICAL", "NOTICE"})
_COUNTERS = (MetricRole.STEP, MetricRole.EPOCH, MetricRole.EPOCH_STEP)


@dataclass(frozen=True, slots=True)
class ParsedName:
    """The name in the text before a number."""

    name: str
    rest: str
    """The text before the name, which may contain the phase."""
    explicit: bool
    """A colon or an equals sign separates name and number."""


def name_before(gap: str) -> ParsedName:
    """The name that the text before a number gives to it, empty if none."""
    if cell := _TABLE_CELL.match(gap):
        return ParsedName(cell[1], "", True)
    bare = gap.rstrip(" \t'\"[({<【")
    wrapped = _WRAPPER.search(bare)
    if wrapped and _NAME_END.search(bare[: wrapped.start()].rstrip()):
        bare = bare[: wrapped.start()].rstrip()
    separator = _NAME_END.search(bare)
    if separator:
        bare = bare[: separator.start()]
    bare = bare.rstrip(" \t'\"*`")
    if bare.endswith("]") and separator:
        bare = bare[:-1]  # [Train loss]: 0.5
    unit = ""
    if bracketed := _PARENTHESIS.match(bare):
        bare, unit = bracketed[1], bracketed[2].strip()
    start = _name_start(bare)
    name, rest = bare[start:], bare[:start]
    return _clean_name(name, rest, unit, explicit=separator is not None)


def _name_start(bare: str) -> int:
    """Where the last part of the text starts."""
    start = 0
    for match in _DELIMITER.finditer(bare):
        start = match.end()
    return start


def _clean_name(name: str, rest: str, unit: str, *, explicit: bool) -> ParsedName:
    name = _UNIT.sub("", name.removesuffix("第").lstrip("轮步次个 ") if "\u4e00" <= name[-1:] <= "\u9fff" else name)
    junk = _LEADING_JUNK.match(name)
    if junk:
        name = name[junk.end() :]
    name = name.strip().strip("'\"`*").strip()
    counter = _trailing_counter(name)
    if counter:
        return ParsedName(counter, f"{rest} {name[: len(name) - len(counter)]} {unit}", explicit)
    if (
        not name
        or len(name) > MAX_NAME_CHARS
        or name.upper() in _LOG_LEVELS
        or _PROSE_WORD.search(name.replace("_", " "))
    ):
        return ParsedName("", f"{rest} {name}", explicit)
    words = name.split()
    if len(words) > (6 if explicit else 3):
        name, rest = " ".join(words[-3:]), f"{rest} {' '.join(words[:-3])}"
    return ParsedName(f"{name} ({unit})" if unit and len(unit) <= 12 and explicit else name, rest, explicit)


def _trailing_counter(name: str) -> str:
    """The trailing words that are a counter: `validation loss at iteration` gives `iteration`."""
    words = name.split()
    for size in (3, 2, 1):
        tail = " ".join(words[-size:])
        if len(words) < size or parse_metric_name(tail).role not in _COUNTERS:
            continue
        if words[-size].lower() in _PREPOSITIONS:
            continue
        before = words[:-size]
        if not before or before[-1].lower() in _PREPOSITIONS or phase_in(" ".join(before)) or len(tail) > 12:
            plain = " ".join(words[-size + 1 :]) if size > 1 and phase_in(words[-size]) else tail
            return plain if plain and parse_metric_name(plain).role in _COUNTERS else tail
    return ""


def name_after(gap: str) -> str:
    """The name after a number, for `0.5 avg loss, 3 epochs`: only counters and losses."""
    match = _NAME_BEHIND.match(gap)
    return match[1] if match and parse_metric_name(match[1]).role in (*_COUNTERS, MetricRole.LOSS) else ""


def phase_in(text: str) -> str:
    """`eval` or `train`, by the last word that names a phase; else empty."""
    phase = ""
    for match in _PHASE.finditer(text):
        phase = "eval" if match[1] or match[3] else "train"
    return phase


def phase_of_name(name: str) -> str:
    """The phase that is part of a name."""
    words = frozenset(split_words(name))
    if parse_metric_name(name).is_eval:
        return "eval"
    return "train" if words & {"train", "training", "trn"} else ""

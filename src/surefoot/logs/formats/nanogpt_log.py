"""The terse logs of llm.c (`s:10 trl:9.8412 lr:0.000600 norm:1.20`) and of build-nanogpt (`10 train 9.841200`)."""

from __future__ import annotations

import re

import numpy as np

from surefoot.logs.formats.console.plain_text import decode_lines
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.table import LogTable, TableBuilder

FORMAT = "nanogpt"
_NAMES = {
    "trl": "train loss", "tel": "val loss", "eval": "eval accuracy", "lr": "lr", "norm": "grad_norm",
    "train": "train loss", "val": "val loss", "hella": "eval accuracy",
}  # fmt: skip
_NUMBER = r"[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan(?:\([\w]*\))?|inf(?:inity)?)"
_LLM_C = re.compile(rf"s:(\d+)((?:[ \t]+(?:trl|tel|eval|lr|norm):{_NUMBER})+)[ \t]*$", re.I)
_PAIR = re.compile(rf"(\w+):({_NUMBER})", re.I)
_NANOGPT = re.compile(rf"(\d+)[ \t]+(train|val|hella)[ \t]+({_NUMBER})[ \t]*$", re.I)
_MIN_SHARE = 0.8
"""Share of the first lines that must be of this format."""


def fits(head: bytes) -> bool:
    """Whether the first lines are of either kind."""
    lines = [line.strip() for line in head[: 1 << 12].decode("utf-8", "replace").split("\n")]
    if len(head) > 1 << 12:
        lines = lines[:-1]
    lines = [line for line in lines if line]
    good = sum(_LLM_C.match(line) is not None or _NANOGPT.match(line) is not None for line in lines)
    return good > 0 and good >= _MIN_SHARE * len(lines)


def read(source: LogSource) -> LogTable:
    """Each line is a record."""
    builder = TableBuilder()
    rest = ""
    for text in decode_lines(source.chunks()):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            _add(builder, line.strip())
    _add(builder, rest.strip())
    return builder.build(FORMAT, source.path)


def _add(builder: TableBuilder, line: str) -> None:
    if found := _LLM_C.match(line):
        values = {_NAMES[name.lower()]: _to_float(number) for name, number in _PAIR.findall(found[2])}
        builder.add({"step": float(found[1]), **values})
    elif found := _NANOGPT.match(line):
        builder.add({"step": float(found[1]), _NAMES[found[2].lower()]: _to_float(found[3])})
    elif line:
        builder.skip("lines of another kind")


def _to_float(number: str) -> float:
    if "nan" in number.lower():
        return float("nan")  # C prints -nan, and nan(ind) on Windows
    try:
        return float(number)
    except ValueError:
        return float(np.nan)

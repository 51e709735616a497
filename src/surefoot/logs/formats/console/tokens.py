"""Splits a console line into tokens: numbers, and text that only looks like numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

NUMBER_PATTERN = r"[-+]?(?:[\d.][-+.\deE]*|[nN][aA][nN]|[iI][nN][fF](?:inity)?)"
"""Pattern of a number in a line of known shape; `float` has the last word."""
_UNIT = (
    r"(?:%|[kKMGTB](?:i?B)?|[mnuµ]s|s|secs?|m|min|mins|hrs?|h|d|x|z|it|tok|tokens|steps?|samples|epochs?|iters?)"
    r"(?:/\w+)?(?![A-Za-z0-9_])"
)
_TOKEN = re.compile(
    rf"""
    (?P<date>(?<![\w.])(?:\d{{4}}[-/.]\d\d?[-/.]\d\d?(?:T[\d:.,]+(?:Z|[+-]\d\d:?\d\d)?)?
        |\d\d?[-/.]\d\d?[-/.]\d{{4}}|\d\d[-/]\d\d(?=[ ]\d\d:\d\d)|\d{{8}}[-_]\d{{6}})(?![\w/]))
  | (?P<clock>(?<![\w.])\d+:\d\d(?::\d\d(?:[.,]\d+)?)?(?![\d.:/%]))
  | (?P<skip>0x[0-9a-fA-F]+ | https?://\S+ | (?<![\w.])\d+(?:\.\d+){{2,}}[\w.+-]*
        | (?<![\w/])(?:~|\.{{1,2}}|[A-Za-z]:)?[/\\][\w.~-]+[/\\][^\s,;)\]'"]*
        | (?<![\w./\\-])[\w./\\-]+\.(?:py|cc|cpp|cu|cuh|h|hpp|c|go|rs|js|ipynb|pt|pth|ckpt|bin|h5|keras
            |safetensors|json|jsonl|ya?ml|txt|log|csv|tsv|npz|npy|pkl|tar|gz|zip|model|parquet|png|onnx|gguf|weights|msgpack)(?:[:\#]L?\d+)*(?![A-Za-z0-9_])
        | (?<![\w.])[a-z_]\w*(?:\.[a-z_]\w*)+:\d+(?=[\s:\])])
        | (?:cuda|gpu|xla|mps|npu|xpu|hpu):\d+ | (?<=\[)\d+,(?=\d+\]<std))
  | (?P<bar>\|[^|\n]*[█▏▎▍▌▋▊▉░▒▓\#][^|\n]*\|(?=\s) | (?<=%)\|\s*\| | [━╸╺╶╴─█▏▎▍▌▋▊▉░▒▓]{{3,}}
        | \[[=>.\#\ -]{{4,}}\])
  | (?P<named>(?<![A-Za-z0-9])(?:epoch|step|iter|iteration|episode|round|batch|rank|Epoch|Step|Iter|EPOCH|STEP|ITER
        |Rank|RANK|Iteration|GPU|gpu)[-_\#]?(?P<count>\d+)(?![\w.]))
  | (?P<num>(?<![A-Za-z0-9_@.])(?<![A-Za-z0-9_][-+])
        (?P<figure>[-+]?(?:\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?(?![\d,]) | \d+,\d+(?:[eE][-+]?\d+)?(?![\d,.])
        | (?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)? | (?i:nan|inf|infinity)(?![A-Za-z_]
            |\ (?:iter|loss|value|grad|step|in\b|or\b|and\b|detect|found|check))))
        (?P<unit>{_UNIT})?(?![A-Za-z_\d])(?!\.\d))
  | (?P<blank>[ \t]+)
  | (?P<word>[A-Za-z_]+)
    """,
    re.X,
)
_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?$")
NOT_A_NUMBER = "\x1f"
"""Marks text in a gap that only looks like a number: no name reaches across it."""
MAX_NUMBERS = 96


@dataclass(slots=True)
class NumberToken:
    """One number of a line."""

    text: str
    gap: str
    """The text between the previous number, or the start of the line, and this one."""
    unit: str
    piece: int
    """The index of its piece in the line's pattern."""

    @property
    def decimal_comma(self) -> bool:
        """Written with a decimal comma, not with commas between thousands."""
        return "," in self.text and not _THOUSANDS.match(self.text)

    @property
    def factor(self) -> float:
        return _SCALES.get(self.unit[:1], 1.0) if self.unit and "/" not in self.unit and len(self.unit) <= 3 else 1.0

    def value(self) -> float:
        return to_float(self.text, comma=self.decimal_comma) * self.factor


@dataclass(slots=True)
class LineTokens:
    """A tokenized line: its numbers, a key shared by lines of the same shape, and the pieces of their pattern."""

    numbers: list[NumberToken]
    key: str
    pieces: list[str]
    tail: str
    """The text after the last number."""
    bar: str
    """The kind of progress bar on the line: tqdm, keras, or empty."""


def to_float(text: str, *, comma: bool = False) -> float:
    """Convert a matched number; raises ValueError if it is none."""
    if "," in text:
        text = text.replace(",", "." if comma else "")
    return float(text)


def tokenize(line: str) -> LineTokens | None:
    """Tokenize a line; None if it has too many numbers to be a row."""
    numbers: list[NumberToken] = []
    key: list[str] = []
    pieces: list[str] = []
    gap: list[str] = []
    bar = ""
    at = 0

    def put(sign: str, pattern: str, gap_text: str) -> None:
        key.append(sign)
        pieces.append(pattern)
        gap.append(gap_text)

    for match in _TOKEN.finditer(line):
        if match.start() > at:
            loose = line[at : match.start()]
            put(loose, re.escape(loose), loose)
        at = match.end()
        kind, text = match.lastgroup or "", match[0]
        if kind == "blank":
            put(" ", _BLANK, text)
        elif kind == "word":
            put(text, text, text)
        elif kind in ("num", "named"):
            known = _number_token(match, "".join(gap), len(pieces))
            gap.clear()
            numbers.append(known[0])
            if len(numbers) > MAX_NUMBERS:
                return None
            for sign, pattern in known[1]:
                key.append(sign)
                pieces.append(pattern)
        else:
            put(*_NON_NUMBERS[kind], NOT_A_NUMBER)
            bar = ("tqdm" if text[0] == "|" else "keras") if kind == "bar" else bar
    rest = line[at:]
    put(rest, re.escape(rest), rest)
    return LineTokens(numbers, _join_key(key, pieces), pieces, "".join(gap), bar)


_BLANK = r"[ \t]+"
_NUMBER = "\x00"
_NON_NUMBERS = {
    "date": ("\x01", r"[\dTZ:.,+/_-]+"),
    "clock": ("\x02", r"[\d:.,]+"),
    "skip": ("\x03", r"\S+"),
    "bar": ("\x04", r"(?:\|[^|\n]*\||[━╸╺╶╴─█▏▎▍▌▋▊▉░▒▓]+|\[[=>.# -]*\])"),
}


def _number_token(match: re.Match[str], gap: str, place: int) -> tuple[NumberToken, list[tuple[str, str]]]:
    """The number, and the key and pattern pieces of its prefix, itself, and its unit."""
    if match.lastgroup == "named":
        word = match["named"][: -len(match["count"])]
        number = NumberToken(match["count"], gap + word + " ", "", place + 1)
        return number, [(word, re.escape(word)), (_NUMBER, r"\d+")]
    text, unit = match["figure"], match["unit"] or ""
    if "," in text:
        return NumberToken(text, gap, unit, place), [
            ("\x05", r"[-+]?[\d.,]*\d(?:[eE][-+]?\d+)?"),
            (unit, re.escape(unit)),
        ]
    return NumberToken(text, gap, unit, place), [(_NUMBER, NUMBER_PATTERN), (unit, re.escape(unit))]


def _join_key(key: list[str], pieces: list[str]) -> str:
    """Join the key; blanks beside a number vary with its width, but between two numbers there is always one."""
    loose = set("\x00\x01\x02\x03\x05")
    for index, sign in enumerate(key):
        if sign != " ":
            continue
        before = next((piece for piece in reversed(key[:index]) if piece), "")
        after = next((piece for piece in key[index + 1 :] if piece), "")
        if (before in loose) != (after in loose):
            key[index], pieces[index] = "", r"[ \t]*"
    return "".join(key)

"""Console text of any trainer: rows are told from chatter by their names and by how lines are made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.consoleblocks import Bars, Block, Columns, Record
from surefoot.logs.consoleshapes import COUNT, HIDDEN, RANK, TOTAL, Kind, Shape, shape_of
from surefoot.logs.consoletext import Since, plain
from surefoot.logs.consoletokens import tokens
from surefoot.logs.meaning import Role, meaning
from surefoot.logs.source import Source, decoded
from surefoot.logs.table import Gatherer, Table

FORMAT = "text"
LONGEST = 1 << 20
"""Characters without an end of line after which one is made up."""
_PART = 1 << 16
_MANY = 24
"""Rows of one making, one after the other, from which they are read together."""
_LINE = 4096
_SHAPES = 2048
_DIGITS = re.compile(r"\d+")
_INTEREST = re.compile(
    r"(?i)loss|step|iter|epoch|nll|ppl|perplex|reward|\bacc|accuracy|\blr\b|learning.rate|norm|update|round|batch|error"
    r"|\d/\d|损失|轮|步|误差|cost|elbo|objective|return|score|mse|\bmae|[|]\d+[|]"
)
_CODE = re.compile(
    r"^\s*(?:import |from \S+ import|def |class |for .* in .*:|if .*:\s*(?:#.*)?$|while .*:|return\b|print\(|#|//|@\w|"
    r"try:|with .*:\s*$|elif |else:|assert |raise |self\.\w|async |lambda )|\b[fF][\"'].*\{|Namespace\(|"
    r"\{[A-Za-z_][\w.]*:[.\d]*[a-z]\}"
)
_OVERFLOW = re.compile(r"(?i)overflow.*(?:skip|ignor|reduc|setting)")
_SCALE_TO = re.compile(r"(?i)(?:reducing|scale|setting)[a-z ]* to:?\s*([\d.]+(?:e[+-]?\d+)?)")
_SCALE = re.compile(r"(?i)loss[ _]scale[: =]+([\d.]+(?:e[+-]?\d+)?)")
_RANK = re.compile(r"(?i)rank\s*(\d+)")
_EVALUATION = re.compile(
    r"(?i)^[^\d]*\b(?:eval|evaluation|validation|test)\b[^\d]*(?:results?|metrics|\*{3,}|:|={3,}|-{3,})\W*$"
)
_FACT = re.compile(
    r"(?i)(?<![A-Za-z0-9_])['\"]?(fp16|bf16|amp|batch_size|train_batch_size|per_device_train_batch_size|micro_batch_size"
    r"|global_batch_size|max_steps|max_iters|train_iters|num_train_epochs|num_epochs|epochs|learning_rate|max_lr|lr|grad_clip"
    r"|clip_grad|max_grad_norm|gradient_clip_val|gradient_clipping|clip_norm|vocab_size|num_classes|num_labels|dtype"
    r"|precision|mixed_precision)['\"]?\s*(?:[:=]|\.{3,})\s*['\"]?([\w.+-]+)"
)
_FACT_LINES = 3000


_Number = TypeVar("_Number", float, NDArray[np.float64])


class Sink(Protocol):
    """What rows go into: a `Gatherer`, or a list."""

    def add(self, record: Mapping[str, float], /) -> None: ...

    def extend(
        self, columns: Mapping[str, NDArray[np.float64]], present: Mapping[str, NDArray[np.bool_]], /
    ) -> None: ...

    def skip(self, reason: str, count: int = 1, /) -> None: ...


class _Rows:
    """Rows as a list."""

    def __init__(self) -> None:
        self.rows: list[Record] = []

    def add(self, record: Mapping[str, float], /) -> None:
        self.rows.append(dict(record))

    def extend(self, columns: Mapping[str, NDArray[np.float64]], present: Mapping[str, NDArray[np.bool_]], /) -> None:
        for values in zip(*(column.tolist() for column in columns.values()), strict=True):
            self.rows.append(dict(zip(columns, values, strict=True)))

    def skip(self, reason: str, count: int = 1, /) -> None:
        pass


class Following:
    """Reads text as it comes: `feed` gives the rows of the lines that are complete."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._rows = _Rows()
        self._sink: Sink = sink if sink is not None else self._rows
        self.facts: dict[str, float | str] = {}
        self.records = 0
        self._rest = ""
        self._since = Since()
        self._shapes: dict[str, Shape] = {}
        self._recent: list[Shape] = []
        self._chatter: set[str] = set()
        self._hot: tuple[Shape, re.Pattern[str]] | None = None
        self._columns: Columns | None = None
        self._pending: tuple[object, Record] | None = None
        self._block = Block()
        self._bars = Bars()
        self._place: Record = {}
        self._base: float | None = None
        self._bar = (0.0, 0.0)
        self._overflows = 0.0
        self._overflow_rank = ""
        self._lines = 0

    @property
    def ending(self) -> str:
        """The text since the last row, where the exception stands that the run may have ended in."""
        return self._since.text() + ("\n" + plain(self._rest) if self._rest else "")

    def feed(self, text: str) -> list[Record]:
        text = self._rest + text
        cut = max(text.rfind("\n"), text.rfind("\r")) + 1
        if len(text) - cut > LONGEST:
            text, cut = text + "\n", len(text) + 1
        self._rest = text[cut:]
        body = plain(text[:cut])
        at = 0
        while at < len(body):
            end = len(body) if len(body) - at < 2 * _PART else body.find("\n", at + _PART) + 1 or len(body)
            self._take(body[at:end])
            at = end
        return self._given()

    def finish(self) -> list[Record]:
        """The last line, though no end of line followed it, and what was held back until more of its kind came."""
        rest, self._rest = self._rest, ""
        for line in plain(rest).split("\n"):
            self._line(line)
        self._settle()
        for row in self._block.close():
            self._put(row)
        for row in self._bars.left():
            self._put(row, clear=False)
        if not self.records:
            for row in self._block.left():
                self._put(row, clear=False)
        return self._given()

    def _given(self) -> list[Record]:
        rows, self._rows.rows = self._rows.rows, []
        return rows

    # Many lines of one making, read together.

    def _take(self, body: str) -> None:
        if self._hot is None:
            for line in body.split("\n"):
                self._line(line)
        else:
            self._together(*self._hot, body if body.endswith("\n") else body + "\n")
        best = max(self._recent, key=lambda shape: shape.seen, default=None)
        if best is not None and best.plain and best.seen >= _MANY and (self._hot is None or self._hot[0] is not best):
            self._hot = (best, re.compile(rf"(?:{best.compiled().pattern})[ \t]*\n|([^\n]*)\n"))
        for shape in self._recent:
            shape.seen //= 2

    def _together(self, shape: Shape, pattern: re.Pattern[str], body: str) -> None:
        run: list[tuple[str, ...]] = []
        for found in pattern.findall(body):
            if found[0]:
                run.append(found)
                continue
            if run:
                self._run(shape, run)
                run = []
            if found[-1]:
                self._line(found[-1])
        if run:
            self._run(shape, run)

    def _run(self, shape: Shape, run: list[tuple[str, ...]]) -> None:
        shape.seen += len(run)
        if len(run) >= _MANY and self._columns is None:
            try:
                self._at_once(shape, run)
                return
            except ValueError:
                pass  # one of them is no number after all
        for found in run:
            self._act(shape, found[:-1], "")

    def _at_once(self, shape: Shape, run: list[tuple[str, ...]]) -> None:
        before: tuple[str, ...] = shape.last
        kept: list[tuple[str, ...]] = []
        for found in run:
            if found != before:
                kept.append(found)
                before = found
        shape.last = before
        columns = list(zip(*kept, strict=True))[:-1]
        values: dict[str, NDArray[np.float64]] = {}
        for name, texts, factor in zip(shape.names, columns, shape.factors, strict=True):
            column = np.fromiter(map(float, _without_commas(texts)), dtype=np.float64, count=len(texts))
            values[name] = column if factor == 1.0 else column * factor
        self._settle()
        self._note_totals({name: float(column[-1]) for name, column in values.items()})
        count, total = values.pop(COUNT, None), values.pop(TOTAL, None)
        if count is not None and total is not None:
            values["step"] = self._step(values[shape.epoch], count, total)
        rows = {name: column for name, column in values.items() if name[:1] != HIDDEN}
        self._sink.extend(rows, {})
        self.records += len(kept)
        self._place = {name: float(column[-1]) for name, column in rows.items() if _counter(name)}
        self._since.clear()

    def _step(self, epoch: _Number, count: _Number, total: _Number) -> _Number:
        """A count within an epoch as a count of the run; epochs are numbered from 0 or from 1."""
        if self._base is None:
            self._base = 0.0 if float(np.min(epoch)) < 1 else 1.0
        return (epoch - self._base) * total + count

    # One line.

    def _line(self, line: str) -> None:
        line = line.rstrip()
        if not line:
            return
        if len(line) > _LINE:
            line = line[:_LINE]
        if self._columns is not None and (row := self._columns.row(line)) is not None:
            self._wait(self._columns, row)
            return
        for index, shape in enumerate(self._recent):
            assert shape.pattern is not None
            match = shape.pattern.fullmatch(line)
            if match:
                if index:
                    self._recent[index - 1], self._recent[index] = shape, self._recent[index - 1]
                shape.seen += 1
                self._act(shape, match.groups(), line)
                return
        self._unknown(line)

    def _unknown(self, line: str) -> None:
        loose = _DIGITS.sub("0", line)
        if loose in self._chatter:
            self._other(line)
            return
        if ("verflow" in line or "OVERFLOW" in line) and self._overflow(line):
            return
        found = tokens(line) if _INTEREST.search(line) and not _CODE.search(line) else None
        if found is None or not found.numbers:
            self._heading(line)
            self._ignore(loose, line)
            return
        shape = self._shapes.get(found.key)
        if shape is None:
            shape, texts = shape_of(found)
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            self._shapes[found.key] = shape
        else:
            self._remember(shape)
            match = shape.compiled().fullmatch(line)
            texts = match.groups() if match else shape_of(found)[1]
        shape.seen += 1
        if shape.kind is Kind.CHATTER:
            self._ignore(loose, line)
        else:
            self._act(shape, texts, line)

    def _remember(self, shape: Shape) -> None:
        """Lines of this making came twice: from now on they are known by their pattern."""
        if shape.kind is Kind.CHATTER or shape in self._recent:
            return
        shape.compiled()
        if len(self._recent) >= 8:
            self._recent.pop()
        self._recent.append(shape)

    def _ignore(self, loose: str, line: str) -> None:
        if len(self._chatter) >= 8192:
            self._chatter.clear()
        self._chatter.add(loose)
        self._other(line)

    def _other(self, line: str) -> None:
        """A line that is no row."""
        self._since.add(line)
        if not line.lstrip().startswith(("|", "-", "+", "=", "│", "└", "├", "┌")) or not line.strip(" |-+="):
            self._close_block()
        self._lines += 1
        if self._lines < _FACT_LINES:
            for match in _FACT.finditer(line):
                self._fact(match[1].lower(), match[2])

    def _fact(self, name: str, text: str) -> None:
        try:
            value: float | str = float(text)
        except ValueError:
            value = text
        if len(self.facts) < 64:
            self.facts.setdefault(name, value)

    def _heading(self, line: str) -> None:
        if _EVALUATION.search(line) and len(line) < 200:
            self._close_block()
            self._block.evaluation = True
        elif len(line) < 1000 and (columns := Columns.of(line)) is not None and not _CODE.search(line):
            self._settle()
            self._columns = columns

    def _act(self, shape: Shape, texts: tuple[str, ...], line: str) -> None:
        if shape.counted and shape.kind is not Kind.PLACE and texts == shape.last:
            self._since.add(line)
            return
        shape.last = texts
        try:
            values = shape.values(texts)
        except ValueError:
            self._sink.skip("lines with numbers that cannot be read")
            self._since.add(line)
            return
        if shape.kind is Kind.SINGLE:
            self._single(values, line)
            return
        if not self._heard(shape, values):
            return
        self._note_totals(values)
        if shape.kind is Kind.PLACE:
            self._stand(shape, values, line)
        elif shape.kind is Kind.BAR:
            self._bar_state(values)
        else:
            self._row(shape, values)

    def _heard(self, shape: Shape, values: Record) -> bool:
        """Whether the rank that speaks is the one that is listened to."""
        rank = values.pop(RANK, None)
        if rank is None:
            return True
        if shape.rank is None:
            shape.rank = rank
        if rank != shape.rank:
            self._sink.skip("lines that other ranks printed as well")
            return False
        return True

    def _note_totals(self, values: Record) -> None:
        """What a counter counts up to is a fact; a share such as 9800/10000 is a number."""
        for hidden in [name for name in values if name.startswith(f"{TOTAL} ")]:
            total = values.pop(hidden)
            name = hidden[len(TOTAL) + 1 :]
            role = meaning(name).role
            if role is Role.STEP:
                self.facts["max_steps"] = total
            elif role is Role.EPOCH:
                self.facts["epochs"] = total
            elif total:
                values[name] = values[name] / total

    def _single(self, values: Record, line: str) -> None:
        self._since.add(line)
        for name, value in values.items():
            if name[:1] != HIDDEN:
                for row in self._block.add(name, value):
                    self._put(row)
        self._lines += 1
        if self._lines < _FACT_LINES:
            for match in _FACT.finditer(line):
                self._fact(match[1].lower(), match[2])

    def _stand(self, shape: Shape, values: Record, line: str) -> None:
        """A line of counters alone: an epoch's heading, or a bar."""
        self._since.add(line)
        count, total = values.pop(COUNT, None), values.pop(TOTAL, None)
        if count is not None and total is not None:
            if shape.bar:
                if total >= self._bar[1]:
                    self._bar = (count, total)
                return
            values["step"] = count
        self._close_block()
        self._place = values
        self._block.begin(values)

    def _bar_state(self, values: Record) -> None:
        count, total = values.pop(COUNT), values.pop(TOTAL)
        epoch = next((value for name, value in self._place.items() if meaning(name).role is Role.EPOCH), None)
        if epoch is not None and self._base is None:
            self._base = 0.0 if epoch < 1 else 1.0
        place = {name: value for name, value in self._place.items() if meaning(name).role is Role.EPOCH}
        self._settle()
        self._close_block()
        for row in self._bars.take(values, place, count, total, (epoch or 0.0) - (self._base or 0.0)):
            self._put(row)
        self._since.clear()

    def _row(self, shape: Shape, values: Record) -> None:
        count, total = values.pop(COUNT, None), values.pop(TOTAL, None)
        if shape.eval and not (shape.steps or shape.epoch):
            values.update(self._place)
        elif count is not None and total is not None and not shape.steps:
            values["step"] = self._counted(shape, values, count, total)
        elif not shape.counted:
            values.update({name: at for name, at in self._place.items() if meaning(name).role is Role.EPOCH})
        elif not shape.steps and self._bar[1] and values[shape.epoch] != int(values[shape.epoch]):
            values["step"] = self._bar[0]
        if shape.kind is Kind.HELD:
            shape.kind = Kind.ROW
            shape.held = values
            return
        if shape.held is not None:
            first, shape.held = shape.held, None
            self._put(first)
        if shape.eval and count is not None:
            self._wait(shape, values)
            return
        self._settle()
        self._put(values)

    def _counted(self, shape: Shape, values: Record, count: float, total: float) -> float:
        epoch = values.get(shape.epoch) if shape.epoch else None
        if epoch is None:
            epoch = next((at for name, at in self._place.items() if name != "step" and _epoch(name)), None)
        if epoch is not None and epoch != int(epoch):
            return count
        if epoch is not None:
            return float(self._step(epoch, count, total))
        if count < shape.count and shape.count >= 0.9 * total:
            shape.passed += total
        shape.count = count
        return shape.passed + count

    def _wait(self, kind: object, row: Record) -> None:
        """Of many states of one evaluation or one table's row only the last counts."""
        if self._pending is not None and not (self._pending[0] is kind and self._same(self._pending[1], row)):
            self._settle()
        self._pending = (kind, row)

    def _same(self, before: Record, row: Record) -> bool:
        counters = [name for name in row if _counter(name)]
        return bool(counters) and all(before.get(name) == row[name] for name in counters)

    def _settle(self) -> None:
        if self._pending is not None:
            row, self._pending = self._pending[1], None
            self._put(row)

    def _close_block(self) -> None:
        for row in self._block.close():
            self._put(row)

    def _put(self, row: Record, *, clear: bool = True) -> None:
        row = {name: value for name, value in row.items() if name[:1] != HIDDEN}
        self._sink.add(row)
        self.records += 1
        place = {name: value for name, value in row.items() if _counter(name)}
        if place:
            self._place = place
        if clear:
            self._since.clear()

    def _overflow(self, line: str) -> bool:
        """An update left out because gradients overflowed: the loss scale that follows, and how many there were."""
        if not _OVERFLOW.search(line):
            return False
        rank = _RANK.search(line)
        self._overflow_rank = self._overflow_rank or (rank[1] if rank else "")
        if rank and rank[1] != self._overflow_rank:
            return True
        self._overflows += 1
        row = {**self._place, "overflow": self._overflows}
        if match := _SCALE.search(line):
            row["loss scale"] = _float(match[1])
        if (match := _SCALE_TO.search(line)) and "hysteresis to" not in match[0]:
            row["loss scale"] = _float(match[1])
        self._settle()
        self._sink.add(row)
        self.records += 1
        return True


def _float(text: str) -> float:
    text = text.rstrip(".")
    return float(text) if text.count(".") < 2 else float("nan")


def _counter(name: str) -> bool:
    return meaning(name).role in (Role.STEP, Role.EPOCH)


def _epoch(name: str) -> bool:
    return meaning(name).role is Role.EPOCH


def _without_commas(texts: tuple[str, ...]) -> Iterator[str] | tuple[str, ...]:
    return (text.replace(",", "") for text in texts) if any("," in text for text in texts[:1]) else texts


def fits(head: bytes) -> bool:
    """Anything that is text: nearly no control characters but those of a console."""
    sample = head[: 1 << 14].replace(b"\0", b"")
    if not sample.strip():
        return False
    strange = sum(sample.count(bytes([code])) for code in (*range(1, 7), *range(14, 27), *range(28, 32), 127))
    return strange <= len(sample) * 0.02


def read(source: Source) -> Table:
    gatherer = Gatherer()
    following = Following(gatherer)
    left = b""
    for chunk in source.chunks():
        chunk = left + chunk
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if len(chunk) - cut > LONGEST:
            cut = len(chunk)
        left = chunk[cut:]
        following.feed(decoded(chunk[:cut]))
    following.feed(decoded(left))
    following.finish()
    gatherer.facts.update(following.facts)
    if source.trouble:
        gatherer.note(f"reading stopped before the end: {source.trouble}")
    return gatherer.table(FORMAT, source.path, following.ending)

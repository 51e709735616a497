"""What reads console text: lines of a making that is known quickly, others with care, chatter hardly at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.consoleblocks import Bars, Block, Columns, Record, evaluated
from surefoot.logs.consoleclues import LOSSES, WORDS, Overflows, is_code, settings
from surefoot.logs.consolenames import phase_in
from surefoot.logs.consoleshapes import COUNT, HIDDEN, RANK, TOTAL, Kind, Shape, shape_of
from surefoot.logs.consolesteps import Steps
from surefoot.logs.consoletext import Since
from surefoot.logs.consoletokens import tokens
from surefoot.logs.meaning import Role, meaning

MANY = 24
"""Rows of one making, one after the other, from which they are read together."""
WIDEST = 4096
"""Characters of a line that are looked at."""
SHAPES = 2048
SETTINGS = 3000
"""Lines that are looked through for settings."""
_DIGITS = re.compile(r"\d+")
_FRAMES = ("|", "-", "+", "=", "│", "└", "├", "┌", "┃")


class Sink(Protocol):
    """What rows go into: a `Gatherer`, or a list."""

    def add(self, record: Mapping[str, float], /) -> None: ...

    def extend(
        self, columns: Mapping[str, NDArray[np.float64]], present: Mapping[str, NDArray[np.bool_]], /
    ) -> None: ...

    def skip(self, reason: str, count: int = 1, /) -> None: ...


class Lines:
    """Takes lines in, puts rows out."""

    def __init__(self, sink: Sink) -> None:
        self.records = 0
        self.since = Since()
        self._sink = sink
        self._steps = Steps()
        self._block = Block()
        self._bars = Bars()
        self._overflows = Overflows()
        self._columns: Columns | None = None
        self._pending: tuple[object, Record] | None = None
        self._shapes: dict[str, Shape] = {}
        self._recent: list[Shape] = []
        self._hot: tuple[Shape, re.Pattern[str]] | None = None
        self._chatter: set[str] = set()
        self._words = WORDS
        self._settings: dict[str, float | str] = {}
        self._looked = 0

    @property
    def facts(self) -> dict[str, float | str]:
        return {**self._settings, **self._steps.facts}

    def take(self, body: str) -> None:
        """Many lines, each with its end."""
        if self._hot is None:
            for line in body.split("\n"):
                self.line(line)
        else:
            self._together(*self._hot, body)
        best = max(self._recent, key=lambda shape: shape.seen, default=None)
        if best is not None and best.plain and best.seen >= MANY and (self._hot is None or self._hot[0] is not best):
            self._hot = (best, re.compile(rf"(?:{best.pattern_text})[ \t]*\n|([^\n]*)\n"))
        for shape in self._recent:
            shape.seen //= 2

    def finish(self) -> None:
        """What was held back until more of its kind came."""
        self._settle()
        self._close_block()
        for row in self._bars.left():
            self._put(row, last=False)
        if not self.records:
            for row in self._block.left():
                self._put(row, last=False)

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
                self.line(found[-1])
        if run:
            self._run(shape, run)

    def _run(self, shape: Shape, run: list[tuple[str, ...]]) -> None:
        shape.seen += len(run)
        if len(run) >= MANY:
            try:
                self._at_once(shape, run)
                return
            except ValueError:
                pass  # one of them is no number after all
        for found in run:
            self._act(shape, found[:-1], "")

    def _at_once(self, shape: Shape, run: list[tuple[str, ...]]) -> None:
        before = (*shape.last, "")
        kept = [found for found, last in zip(run, [before, *run], strict=False) if found != last]
        if not kept:
            return
        values: dict[str, NDArray[np.float64]] = {}
        columns = zip(*kept, strict=True)
        for name, texts, factor in zip(shape.names, columns, shape.factors, strict=False):
            plain = (text.replace(",", "") for text in texts) if "," in texts[0] else texts
            column = np.fromiter(map(float, plain), dtype=np.float64, count=len(texts))
            values[name] = column if factor == 1.0 else column * factor
        shape.last = run[-1][:-1]
        self._settle()
        self._close_block()
        self._steps.totals(values)
        self._steps.counted(shape, values)
        self._sink.extend(values, {})
        self.records += len(kept)
        self._steps.seen({name: float(column[-1]) for name, column in values.items()})
        self.since.clear()

    def line(self, line: str) -> None:
        line = line.rstrip()
        if not line:
            return
        line = line[:WIDEST]
        if self._columns is not None and (row := self._columns.row(line)) is not None:
            self._wait(self._columns, row)
            return
        for index, shape in enumerate(self._recent):
            match = shape.compiled().fullmatch(line)
            if match:
                if index:
                    self._recent[index - 1], self._recent[index] = shape, self._recent[index - 1]
                shape.seen += 1
                self._act(shape, match.groups(), line)
                return
        loose = _DIGITS.sub("0", line)
        if loose in self._chatter:
            self._other(line)
        elif not self._unknown(line):
            if len(self._chatter) >= 4 * SHAPES:
                self._chatter.clear()
            self._chatter.add(loose)
            self._other(line)

    def _unknown(self, line: str) -> bool:
        """A line of a making that is not known yet; whether it is of use."""
        left_out = self._overflows.take(line)
        if left_out is not None:
            if left_out:
                self._settle()
                self._put({**self._steps.place, **left_out}, last=False)
            return True
        low = line.lower()
        if not any([word in low for word in self._words]) or is_code(line):  # noqa: C419 - a list is quicker here
            return False
        found = tokens(line)
        if found is None or not found.numbers:
            return found is not None and self._heading(line)
        shape = self._shapes.get(found.key)
        if shape is None:
            shape, texts = shape_of(found)
            if len(self._shapes) >= SHAPES:
                self._shapes.clear()
                self._words = LOSSES  # so much text that only looks like rows: from here on only losses count
            self._shapes[found.key] = shape
        else:
            match = shape.compiled().fullmatch(line)
            texts = match.groups() if match else shape_of(found)[1]
            self._remember(shape)
        shape.seen += 1
        if shape.kind is Kind.CHATTER:
            return False
        self._act(shape, texts, line)
        return True

    def _remember(self, shape: Shape) -> None:
        """Lines of this making came twice: from now on they are known by their pattern."""
        if shape.kind is not Kind.CHATTER and shape not in self._recent:
            if len(self._recent) >= 8:
                self._recent.pop()
            self._recent.append(shape)

    def _other(self, line: str) -> None:
        """A line that is no row."""
        self.since.add(line)
        if not line.lstrip().startswith(_FRAMES) or not line.strip(" |-+=│┃└├┌"):
            self._close_block()
        self._look(line)

    def _look(self, line: str) -> None:
        self._looked += 1
        if self._looked < SETTINGS and len(self._settings) < 64:
            for name, value in settings(line):
                self._settings.setdefault(name, value)

    def _heading(self, line: str) -> bool:
        """The heading of an evaluation or of a table, which tells what the lines below it are."""
        if len(line) > 1000:
            return False
        if phase_in(line) == "eval" and line.endswith((":", "*", "=", "-", "#", "results", "metrics")):
            self._close_block()
            self._block.evaluation = True
        elif (columns := Columns.of(line)) is not None:
            self._settle()
            self._columns = columns
        else:
            return False
        self.since.add(line)
        return True

    def _act(self, shape: Shape, texts: tuple[str, ...], line: str) -> None:
        """A line of a known making."""
        if texts == shape.last and shape.counted and shape.kind is not Kind.PLACE:
            self.since.add(line)
            return
        shape.last = texts
        try:
            values = shape.values(texts)
        except ValueError:
            self._sink.skip("lines with numbers that cannot be read")
            self.since.add(line)
            return
        if not self._heard(shape, values):
            return
        self._steps.totals(values)
        if shape.kind is Kind.SINGLE:
            self._single(values, line)
        elif shape.kind is Kind.PLACE:
            self._stand(shape, values, line)
        elif shape.kind is Kind.BAR:
            self._bar(values)
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
        return rank == shape.rank

    def _single(self, values: Record, line: str) -> None:
        self.since.add(line)
        self._look(line)
        for name, value in values.items():
            if name[:1] != HIDDEN:
                for row in self._block.add(name, value, self.records):
                    self._put(row)

    def _stand(self, shape: Shape, values: Record, line: str) -> None:
        """A line of counters alone: an epoch's heading, or a bar."""
        count, total = values.pop(COUNT, None), values.pop(TOTAL, None)
        if shape.bar:
            if count is not None and total is not None and total >= self._steps.bar[1]:
                self._steps.bar = (count, total)
            return
        self.since.add(line)
        if count is not None:
            values["step"] = count
        self._close_block()
        self._steps.seen(values)
        self._block.begin(self._steps.place)

    def _bar(self, values: Record) -> None:
        """A state of a bar that shows the mean over an epoch so far."""
        count, total = values.pop(COUNT), values.pop(TOTAL)
        self._settle()
        self._block.begin({})
        self.since.clear()
        for row in self._bars.take(values, self._steps.epochs(), count, total, self._steps.before()):
            self._put(row)

    def _row(self, shape: Shape, values: Record) -> None:
        passing = shape.eval and COUNT in values
        self._steps.counted(shape, values)
        if self._block.evaluation and not shape.counted:
            values = evaluated(values)
            self._steps.lend(shape, values, evaluation=True)
        else:
            self._steps.lend(shape, values)
        self._block.evaluation = False
        if shape.kind is Kind.HELD:
            shape.kind = Kind.ROW
            if not (shape.loss and self._steps.place):
                shape.held = (self.records, values)
                return
        if shape.held is not None:
            (since, first), shape.held = shape.held, None
            if since == self.records or not shape.counted:
                self._put(first)
        if passing:
            self._wait(shape, values)
            return
        self._settle()
        self._close_block()
        self._put(values)

    def _wait(self, kind: object, row: Record) -> None:
        """Of many states of one evaluation or of one row of a table only the last counts."""
        if self._pending is not None and not (self._pending[0] is kind and _same(self._pending[1], row)):
            self._settle()
        self._pending = (kind, row)

    def _settle(self) -> None:
        if self._pending is not None:
            row, self._pending = self._pending[1], None
            self._put(row)

    def _close_block(self) -> None:
        for row in self._block.close(self.records):
            self._put(row)

    def _put(self, row: Record, *, last: bool = True) -> None:
        self._sink.add(row)
        self.records += 1
        self._steps.seen(row)
        if last:
            self.since.clear()


def _same(before: Record, row: Record) -> bool:
    counters = [name for name in row if meaning(name).role in (Role.STEP, Role.EPOCH)]
    return bool(counters) and all(before.get(name) == row[name] for name in counters)

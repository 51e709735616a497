"""What becomes of a line whose making is known: a row, a part of one, a place in the run, a state of a bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.reading.console.blocks import Bars, Block, Record, evaluated
from surefoot.logs.reading.console.shapes import COUNT, HIDDEN, RANK, TOTAL, Kind, Shape
from surefoot.logs.reading.console.steps import Steps
from surefoot.logs.reading.console.text import Since
from surefoot.logs.reading.meaning import Role, meaning


class Sink(Protocol):
    """What rows go into: a `Gatherer`, or a list."""

    def add(self, record: Mapping[str, float], /) -> None: ...

    def extend(
        self, columns: Mapping[str, NDArray[np.float64]], present: Mapping[str, NDArray[np.bool_]], /
    ) -> None: ...

    def skip(self, reason: str, count: int = 1, /) -> None: ...


class Rows:
    """Puts rows together and into a sink."""

    def __init__(self, sink: Sink) -> None:
        self.records = 0
        self.since = Since()
        self.steps = Steps()
        self.block = Block()
        self._sink = sink
        self._bars = Bars()
        self._pending: tuple[object, Record] | None = None

    def extend(self, shape: Shape, values: dict[str, NDArray[np.float64]], count: int) -> None:
        """Many rows of one making."""
        self.settle()
        self.close_block()
        self.steps.totals(values)
        self.steps.counted(shape, values)
        self._sink.extend(values, {})
        self.records += count
        self.steps.seen({name: float(column[-1]) for name, column in values.items()})
        self.since.clear()

    def finish(self) -> None:
        """What was held back until more of its kind came."""
        self.settle()
        self.close_block()
        for row in self._bars.left():
            self.put(row, last=False)
        if not self.records:
            for row in self.block.left():
                self.put(row, last=False)

    def act(self, shape: Shape, texts: tuple[str, ...], line: str) -> None:
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
        self.steps.totals(values)
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
        for name, value in values.items():
            if name[:1] != HIDDEN:
                for row in self.block.add(name, value, self.records):
                    self.put(row)

    def _stand(self, shape: Shape, values: Record, line: str) -> None:
        """A line of counters alone: an epoch's heading, or a bar."""
        count, total = values.pop(COUNT, None), values.pop(TOTAL, None)
        if shape.bar:
            if count is not None and total is not None and total >= self.steps.bar[1]:
                self.steps.bar = (count, total)
            return
        self.since.add(line)
        if count is not None:
            values["step"] = count
        self.close_block()
        self.steps.seen(values)
        self.block.begin(self.steps.place)

    def _bar(self, values: Record) -> None:
        """A state of a bar that shows the mean over an epoch so far."""
        count, total = values.pop(COUNT), values.pop(TOTAL)
        self.settle()
        self.block.begin({})
        self.since.clear()
        place = dict(self.steps.place)
        for row in self._bars.take(values, self.steps.epochs(), count, total, self.steps.before()):
            self.put(row)
            self.steps.place.update(place)  # the row was of the epoch before

    def _row(self, shape: Shape, values: Record) -> None:
        passing = shape.eval and COUNT in values
        self.steps.counted(shape, values)
        if self.block.evaluation and not shape.counted:
            values = evaluated(values)
            self.steps.lend(shape, values, evaluation=True)
        else:
            self.steps.lend(shape, values)
        self.block.evaluation = False
        if shape.kind is Kind.HELD:
            shape.kind = Kind.ROW
            if not (shape.loss and self.steps.place):
                shape.held = (self.records, values)
                return
        if shape.held is not None:
            (since, first), shape.held = shape.held, None
            if since == self.records or not shape.counted:
                self.put(first)
        if passing:
            self.wait(shape, values)
            return
        self.settle()
        self.close_block()
        self.put(values)

    def wait(self, kind: object, row: Record) -> None:
        """Of many states of one evaluation or of one row of a table only the last counts."""
        if self._pending is not None and not (self._pending[0] is kind and _same(self._pending[1], row)):
            self.settle()
        self._pending = (kind, row)

    def settle(self) -> None:
        if self._pending is not None:
            row, self._pending = self._pending[1], None
            self.put(row)

    def close_block(self) -> None:
        for row in self.block.close(self.records):
            self.put(row)

    def put(self, row: Record, *, last: bool = True) -> None:
        self._sink.add(row)
        self.records += 1
        self.steps.seen(row)
        if last:
            self.since.clear()


def _same(before: Record, row: Record) -> bool:
    counters = [name for name in row if meaning(name).role in (Role.STEP, Role.EPOCH)]
    return bool(counters) and all(before.get(name) == row[name] for name in counters)

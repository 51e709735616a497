"""What becomes of a line whose making is known: a row, a part of one, a place in the run, a state of a bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.reading.console.blocks import EpochBars, NameValueBlock, Record, as_eval
from surefoot.logs.reading.console.shapes import COUNT, HIDDEN, RANK, TOTAL, LineKind, LineShape
from surefoot.logs.reading.console.steps import StepTracker
from surefoot.logs.reading.console.text import TextSinceRow
from surefoot.logs.reading.meaning import MetricRole, parse_metric_name


class RowSink(Protocol):
    """What rows go into: a `Gatherer`, or a list."""

    def add(self, record: Mapping[str, float], /) -> None: ...

    def extend(
        self, columns: Mapping[str, NDArray[np.float64]], present: Mapping[str, NDArray[np.bool_]], /
    ) -> None: ...

    def skip(self, reason: str, count: int = 1, /) -> None: ...


class RowBuilder:
    """Puts rows together and into a sink."""

    def __init__(self, sink: RowSink) -> None:
        self.records = 0
        self.text_since_row = TextSinceRow()
        self.steps = StepTracker()
        self.block = NameValueBlock()
        self._sink = sink
        self._bars = EpochBars()
        self._pending: tuple[object, Record] | None = None

    def extend(self, shape: LineShape, values: dict[str, NDArray[np.float64]], count: int) -> None:
        """Many rows of one making."""
        self.release_held()
        self.close_block()
        self.steps.resolve_totals(values)
        self.steps.resolve_count(shape, values)
        self._sink.extend(values, {})
        self.records += count
        self.steps.update_position({name: float(column[-1]) for name, column in values.items()})
        self.text_since_row.clear()

    def finish(self) -> None:
        """What was held back until more of its kind came."""
        self.release_held()
        self.close_block()
        for row in self._bars.pending_rows():
            self.put(row, last=False)
        if not self.records:
            for row in self.block.pending_rows():
                self.put(row, last=False)

    def add_line(self, shape: LineShape, texts: tuple[str, ...], line: str) -> None:
        """A line of a known making."""
        if texts == shape.last and shape.has_counter and shape.kind is not LineKind.POSITION:
            self.text_since_row.add(line)
            return
        shape.last = texts
        try:
            values = shape.values(texts)
        except ValueError:
            self._sink.skip("lines with numbers that cannot be read")
            self.text_since_row.add(line)
            return
        if not self._heard(shape, values):
            return
        self.steps.resolve_totals(values)
        if shape.kind is LineKind.SINGLE:
            self._single(values, line)
        elif shape.kind is LineKind.POSITION:
            self._stand(shape, values, line)
        elif shape.kind is LineKind.BAR:
            self._bar(values)
        else:
            self._row(shape, values)

    def _heard(self, shape: LineShape, values: Record) -> bool:
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
        self.text_since_row.add(line)
        for name, value in values.items():
            if name[:1] != HIDDEN:
                for row in self.block.add(name, value, self.records):
                    self.put(row)

    def _stand(self, shape: LineShape, values: Record, line: str) -> None:
        """A line of counters alone: an epoch's heading, or a bar."""
        count, total = values.pop(COUNT, None), values.pop(TOTAL, None)
        if shape.bar:
            if count is not None and total is not None and total >= self.steps.bar[1]:
                self.steps.bar = (count, total)
            return
        self.text_since_row.add(line)
        if count is not None:
            values["step"] = count
        self.close_block()
        self.steps.update_position(values)
        self.block.begin(self.steps.position)

    def _bar(self, values: Record) -> None:
        """A state of a bar that shows the mean over an epoch so far."""
        count, total = values.pop(COUNT), values.pop(TOTAL)
        self.release_held()
        self.block.begin({})
        self.text_since_row.clear()
        place = dict(self.steps.position)
        for row in self._bars.add(values, self.steps.epochs(), count, total, self.steps.epochs_done()):
            self.put(row)
            self.steps.position.update(place)  # the row was of the epoch before

    def _row(self, shape: LineShape, values: Record) -> None:
        passing = shape.is_eval and COUNT in values
        self.steps.resolve_count(shape, values)
        if self.block.is_eval and not shape.has_counter:
            values = as_eval(values)
            self.steps.fill_position(shape, values, evaluation=True)
        else:
            self.steps.fill_position(shape, values)
        self.block.is_eval = False
        if shape.kind is LineKind.UNCONFIRMED:
            shape.kind = LineKind.ROW
            if not (shape.has_loss and self.steps.position):
                shape.unconfirmed_row = (self.records, values)
                return
        if shape.unconfirmed_row is not None:
            (since, first), shape.unconfirmed_row = shape.unconfirmed_row, None
            if since == self.records or not shape.has_counter:
                self.put(first)
        if passing:
            self.hold(shape, values)
            return
        self.release_held()
        self.close_block()
        self.put(values)

    def hold(self, kind: object, row: Record) -> None:
        """Of many states of one evaluation or of one row of a table only the last counts."""
        if self._pending is not None and not (self._pending[0] is kind and _same(self._pending[1], row)):
            self.release_held()
        self._pending = (kind, row)

    def release_held(self) -> None:
        if self._pending is not None:
            row, self._pending = self._pending[1], None
            self.put(row)

    def close_block(self) -> None:
        for row in self.block.close(self.records):
            self.put(row)

    def put(self, row: Record, *, last: bool = True) -> None:
        self._sink.add(row)
        self.records += 1
        self.steps.update_position(row)
        if last:
            self.text_since_row.clear()


def _same(before: Record, row: Record) -> bool:
    counters = [name for name in row if parse_metric_name(name).role in (MetricRole.STEP, MetricRole.EPOCH)]
    return bool(counters) and all(before.get(name) == row[name] for name in counters)

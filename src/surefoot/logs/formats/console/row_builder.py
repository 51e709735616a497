"""Builds rows from lines of known shape, and tracks the step and epoch they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.console.line_shapes import COUNT, HIDDEN, RANK, TOTAL, LineKind, LineShape
from surefoot.logs.formats.console.multiline_rows import EpochBars, NameValueBlock, Record, as_eval
from surefoot.logs.formats.console.plain_text import TextSinceRow
from surefoot.logs.formats.metric_names import MetricRole, parse_metric_name

Floats = NDArray[np.float64]
_Values = TypeVar("_Values", float, Floats)


class StepTracker:
    """Tracks the last counters, which may be on the line, before it, or on a progress bar."""

    def __init__(self) -> None:
        self.position: dict[str, float] = {}
        """Counters of the last row or heading that had any."""
        self.bar = (0.0, 0.0)
        """Count and total of the longest progress bar."""
        self.settings: dict[str, float | str] = {}
        """Totals of the counters."""
        self._first_epoch: float | None = None

    def epochs(self) -> dict[str, float]:
        return {name: at for name, at in self.position.items() if parse_metric_name(name).role is MetricRole.EPOCH}

    def epochs_done(self) -> float:
        """Epochs completed before the current one."""
        return next((at - self.first_epoch(at) for at in self.epochs().values()), 0.0)

    def first_epoch(self, epoch: float) -> float:
        """The number of the first epoch, 0 or 1."""
        if self._first_epoch is None:
            self._first_epoch = 0.0 if epoch < 1 else 1.0
        return self._first_epoch

    def resolve_totals(self, values: dict[str, _Values]) -> None:
        """Turn the total of a counter into a setting, and a share such as 9800/10000 into a number."""
        for hidden in [name for name in values if name.startswith(f"{TOTAL} ")]:
            total = values.pop(hidden)
            name = hidden[len(TOTAL) + 1 :]
            role = parse_metric_name(name).role
            if role is MetricRole.STEP:
                self.settings["max_steps"] = float(np.max(total))
            elif role is MetricRole.EPOCH:
                self.settings["epochs"] = float(np.max(total))
            elif np.all(total != 0):
                values[name] = values[name] / total

    def resolve_count(self, shape: LineShape, values: dict[str, _Values]) -> None:
        """Set the step of rows with an unnamed counter such as 10/300."""
        count, total = values.pop(COUNT, None), values.pop(TOTAL, None)
        if count is None or total is None or shape.has_steps or shape.is_eval:
            return
        epoch = values[shape.epoch] if shape.epoch else None
        if epoch is None:
            epoch = next(iter(self.epochs().values()), None)
        if epoch is None:
            values["step"] = self._continue_count(shape, count, total)
        elif np.any(np.asarray(epoch) % 1):
            values["step"] = count  # fractional epochs: the counter spans the run
        else:
            values["step"] = (epoch - self.first_epoch(float(np.min(epoch)))) * total + count

    def _continue_count(self, shape: LineShape, count: _Values, total: _Values) -> _Values:
        """Continue a counter that restarts with every bar."""
        counts, totals = np.atleast_1d(count), np.atleast_1d(total)
        before = np.concatenate([[shape.count], counts[:-1]])
        again = (counts < before) & (before >= 0.9 * totals)
        passed = shape.steps_before + np.cumsum(again * totals)
        shape.count, shape.steps_before = float(counts[-1]), float(passed[-1])
        return cast("_Values", count + passed if isinstance(count, np.ndarray) else float(count + passed[0]))

    def fill_position(self, shape: LineShape, values: dict[str, float], *, evaluation: bool = False) -> None:
        """Fill in the position of a row without counters: eval rows take all counters, others the epoch."""
        if shape.has_steps or "step" in values:
            return
        if (shape.is_eval or evaluation) and not shape.epoch:
            values.update(self.position)
        elif not shape.has_counter:
            values.update(self.epochs())
        elif shape.epoch and self.bar[1] and values[shape.epoch] % 1:
            values["step"] = self.bar[0]

    def update_position(self, values: Mapping[str, float]) -> None:
        place = {
            name: value
            for name, value in values.items()
            if parse_metric_name(name).role in (MetricRole.STEP, MetricRole.EPOCH)
        }
        if place:
            self.position = {**self.epochs(), **place}


class RowSink(Protocol):
    """Receives rows: a `TableBuilder`, or a list."""

    def add(self, record: Mapping[str, float], /) -> None: ...

    def extend(
        self, columns: Mapping[str, NDArray[np.float64]], present: Mapping[str, NDArray[np.bool_]], /
    ) -> None: ...

    def skip(self, reason: str, count: int = 1, /) -> None: ...


class RowBuilder:
    """Builds rows and adds them to a sink."""

    def __init__(self, sink: RowSink) -> None:
        self.records = 0
        self.text_since_row = TextSinceRow()
        self.steps = StepTracker()
        self.block = NameValueBlock()
        self._sink = sink
        self._bars = EpochBars()
        self._held: tuple[object, Record] | None = None

    def extend(self, shape: LineShape, values: dict[str, NDArray[np.float64]], count: int) -> None:
        """Add many rows of one shape."""
        self.release_held()
        self.close_block()
        self.steps.resolve_totals(values)
        self.steps.resolve_count(shape, values)
        self._sink.extend(values, {})
        self.records += count
        self.steps.update_position({name: float(column[-1]) for name, column in values.items()})
        self.text_since_row.clear()

    def finish(self) -> None:
        """Release the rows held back for confirmation."""
        self.release_held()
        self.close_block()
        for row in self._bars.pending_rows():
            self.put(row, last=False)
        if not self.records:
            for row in self.block.pending_rows():
                self.put(row, last=False)

    def add_line(self, shape: LineShape, texts: tuple[str, ...], line: str) -> None:
        """Add a line of a known shape."""
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
        if not self._is_from_chosen_rank(shape, values):
            return
        self.steps.resolve_totals(values)
        if shape.kind is LineKind.SINGLE:
            self._add_single(values, line)
        elif shape.kind is LineKind.POSITION:
            self._add_position(shape, values, line)
        elif shape.kind is LineKind.BAR:
            self._add_bar(values)
        else:
            self._add_row(shape, values)

    def _is_from_chosen_rank(self, shape: LineShape, values: Record) -> bool:
        """Whether the line comes from the one rank that is read."""
        rank = values.pop(RANK, None)
        if rank is None:
            return True
        if shape.rank is None:
            shape.rank = rank
        if rank != shape.rank:
            self._sink.skip("lines repeated by other ranks")
        return rank == shape.rank

    def _add_single(self, values: Record, line: str) -> None:
        self.text_since_row.add(line)
        for name, value in values.items():
            if name[:1] != HIDDEN:
                for row in self.block.add(name, value, self.records):
                    self.put(row)

    def _add_position(self, shape: LineShape, values: Record, line: str) -> None:
        """Handle a line of counters alone: an epoch's heading, or a bar."""
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

    def _add_bar(self, values: Record) -> None:
        """Handle a state of a bar that shows the running mean of an epoch."""
        count, total = values.pop(COUNT), values.pop(TOTAL)
        self.release_held()
        self.block.begin({})
        self.text_since_row.clear()
        place = dict(self.steps.position)
        for row in self._bars.add(values, self.steps.epochs(), count, total, self.steps.epochs_done()):
            self.put(row)
            self.steps.position.update(place)  # the row belongs to the previous epoch

    def _add_row(self, shape: LineShape, values: Record) -> None:
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
        """Hold a row: of many states of one evaluation or table row only the last counts."""
        if self._held is not None and not (self._held[0] is kind and _same_position(self._held[1], row)):
            self.release_held()
        self._held = (kind, row)

    def release_held(self) -> None:
        if self._held is not None:
            row, self._held = self._held[1], None
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


def _same_position(before: Record, row: Record) -> bool:
    counters = [name for name in row if parse_metric_name(name).role in (MetricRole.STEP, MetricRole.EPOCH)]
    return bool(counters) and all(before.get(name) == row[name] for name in counters)

"""What reads console text: lines of a making that is known quickly, others with care, chatter hardly at all."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.reading.console.blocks import TextTableHeader
from surefoot.logs.reading.console.clues import LOSS_WORDS, ROW_WORDS, OverflowCounter, is_code, find_settings
from surefoot.logs.reading.console.names import phase_in
from surefoot.logs.reading.console.rows import RowBuilder, RowSink
from surefoot.logs.reading.console.shapes import LineKind, LineShape, shape_of
from surefoot.logs.reading.console.text import TextSinceRow
from surefoot.logs.reading.console.tokens import tokenize

MIN_BATCH = 24
"""Rows of one making, one after the other, from which they are read together."""
MAX_LINE_CHARS = 4096
"""Characters of a line that are looked at."""
MAX_SHAPES = 2048
MAX_SETTINGS_LINES = 3000
"""Lines that are looked through for settings."""
_DIGITS = re.compile(r"\d+")
_FRAMES = ("|", "-", "+", "=", "│", "└", "├", "┌", "┃")


class LineReader:
    """Takes lines in, puts rows out."""

    def __init__(self, sink: RowSink) -> None:
        self._rows = RowBuilder(sink)
        self._overflows = OverflowCounter()
        self._columns: TextTableHeader | None = None
        self._shapes: dict[str, LineShape] = {}
        self._recent: list[LineShape] = []
        self._hot: tuple[LineShape, re.Pattern[str]] | None = None
        self._chatter: set[str] = set()
        self._words = ROW_WORDS
        self._settings: dict[str, float | str] = {}
        self._looked = 0

    @property
    def text_since_row(self) -> TextSinceRow:
        """The text since the last row."""
        return self._rows.text_since_row

    @property
    def settings(self) -> dict[str, float | str]:
        return {**self._settings, **self._rows.steps.settings}

    def feed(self, body: str) -> None:
        """Many lines, each with its end."""
        if self._hot is None:
            for line in body.split("\n"):
                self.line(line)
        else:
            self._together(*self._hot, body)
        best = max(self._recent, key=lambda shape: shape.seen, default=None)
        if best is not None and best.plain and best.seen >= MIN_BATCH and (self._hot is None or self._hot[0] is not best):
            self._hot = (best, re.compile(rf"(?:{best.pattern_text})[ \t]*\n|([^\n]*)\n"))
        for shape in self._recent:
            shape.seen //= 2

    def finish(self) -> None:
        """What was held back until more of its kind came."""
        self._rows.finish()

    def _together(self, shape: LineShape, pattern: re.Pattern[str], body: str) -> None:
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

    def _run(self, shape: LineShape, run: list[tuple[str, ...]]) -> None:
        shape.seen += len(run)
        if len(run) >= MIN_BATCH:
            try:
                self._at_once(shape, run)
                return
            except ValueError:
                pass  # one of them is no number after all
        for found in run:
            self._act(shape, found[:-1], "")

    def _at_once(self, shape: LineShape, run: list[tuple[str, ...]]) -> None:
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
        self._rows.extend(shape, values, len(kept))

    def line(self, line: str) -> None:
        line = line.rstrip()
        if not line:
            return
        line = line[:MAX_LINE_CHARS]
        if self._columns is not None and (row := self._columns.row(line)) is not None:
            self._rows.hold(self._columns, row)
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
            if len(self._chatter) >= 4 * MAX_SHAPES:
                self._chatter.clear()
            self._chatter.add(loose)
            self._other(line)

    def _unknown(self, line: str) -> bool:
        """A line of a making that is not known yet; whether it is of use."""
        left_out = self._overflows.parse(line)
        if left_out is not None:
            if left_out:
                self._rows.release_held()
                self._rows.put({**self._rows.steps.position, **left_out}, last=False)
            return True
        low = line.lower()
        if not any([word in low for word in self._words]) or is_code(line):  # noqa: C419 - a list is quicker here
            return False
        found = tokenize(line)
        if found is None or not found.numbers:
            return found is not None and self._heading(line)
        shape = self._shapes.get(found.key)
        if shape is None:
            shape, texts = shape_of(found)
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
                self._words = LOSS_WORDS  # so much text that only looks like rows: from here on only losses count
            self._shapes[found.key] = shape
        else:
            match = shape.compiled().fullmatch(line)
            texts = match.groups() if match else shape_of(found)[1]
            self._remember(shape)
        shape.seen += 1
        if shape.kind is LineKind.CHATTER:
            return False
        self._act(shape, texts, line)
        return True

    def _act(self, shape: LineShape, texts: tuple[str, ...], line: str) -> None:
        self._rows.add_line(shape, texts, line)
        if shape.kind is LineKind.SINGLE:
            self._look(line)

    def _remember(self, shape: LineShape) -> None:
        """Lines of this making came twice: from now on they are known by their pattern."""
        if shape.kind is not LineKind.CHATTER and shape not in self._recent:
            if len(self._recent) >= 8:
                self._recent.pop()
            self._recent.append(shape)

    def _other(self, line: str) -> None:
        """A line that is no row."""
        self._rows.text_since_row.add(line)
        if not line.lstrip().startswith(_FRAMES) or not line.strip(" |-+=│┃└├┌"):
            self._rows.close_block()
        self._look(line)

    def _look(self, line: str) -> None:
        self._looked += 1
        if self._looked < MAX_SETTINGS_LINES and len(self._settings) < 64:
            for name, value in find_settings(line):
                self._settings.setdefault(name, value)

    def _heading(self, line: str) -> bool:
        """The heading of an evaluation or of a table, which tells what the lines below it are."""
        if len(line) > 1000:
            return False
        if phase_in(line) == "eval" and line.endswith((":", "*", "=", "-", "#", "results", "metrics")):
            self._rows.close_block()
            self._rows.block.is_eval = True
        elif (columns := TextTableHeader.parse(line)) is not None:
            self._rows.release_held()
            self._columns = columns
        else:
            return False
        self._rows.text_since_row.add(line)
        return True

"""Reads console lines: known line shapes by their pattern, new ones with care, chatter hardly at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.console.line_shapes import LineKind, LineShape, shape_of
from surefoot.logs.formats.console.multiline_rows import TextTableHeader
from surefoot.logs.formats.console.plain_text import TextSinceRow
from surefoot.logs.formats.console.row_builder import RowBuilder, RowSink
from surefoot.logs.formats.console.tokens import tokenize
from surefoot.logs.formats.console.value_names import phase_in

LOSS_WORDS = ("loss", "nll", "ppl", "perplex", "损失", "elbo")
ROW_WORDS = (
    *LOSS_WORDS, "step", "iter", "epoch", "reward", "acc", "lr", "norm", "update", "round", "batch", "error",
    "learning", "cost", "objective", "return", "score", "mse", "mae", "l1", "l2", "eval", "valid", "test", "scale",
    "%|", "轮", "步", "误差",
)  # fmt: skip
"""A line without any of these contains no row."""
_CODE = re.compile(
    r"^\s*(?:import |from \S+ import|def |class |for .* in .*:|if .*:\s*(?:#.*)?$|while .*:|return\b|print\(|#|//|@\w|"
    r"try:|with .*:\s*$|elif |else:|assert |raise |self\.\w|async |lambda )|\b[fF][\"'].*\{|Namespace\(|"
    r"\{[A-Za-z_][\w.]*:[.\d]*[a-z]\}"
)
_OVERFLOW = re.compile(r"(?i)overflow.*(?:skip|ignor|reduc|setting)")
_SCALE_TO = re.compile(r"(?i)(?:reducing|scale|setting)[a-z ]* to:?\s*([\d.]+(?:e[+-]?\d+)?)")
_SCALE = re.compile(r"(?i)loss[ _]scale[: =]+([\d.]+(?:e[+-]?\d+)?)")
_RANK = re.compile(r"(?i)rank\s*(\d+)")
_SETTING = re.compile(
    r"(?i)(?<![A-Za-z0-9_])['\"]?(fp16|bf16|amp|batch_size|train_batch_size|per_device_train_batch_size|micro_batch_size"
    r"|global_batch_size|max_steps|max_iters|train_iters|num_train_epochs|num_epochs|epochs|learning_rate|max_lr|lr"
    r"|grad_clip|clip_grad|max_grad_norm|gradient_clip_val|gradient_clipping|clip_norm|vocab_size|num_classes|num_labels"
    r"|dtype|precision|mixed_precision)['\"]?\s*(?:[:=]|\.{3,})\s*['\"]?([\w.+-]+)"
)


def is_code(line: str) -> bool:
    """Whether a line is source code or a template, whose numbers were never measured."""
    return _CODE.search(line) is not None


def find_settings(line: str) -> Iterator[tuple[str, float | str]]:
    """Settings in a line, by name."""
    for match in _SETTING.finditer(line):
        try:
            yield match[1].lower(), float(match[2])
        except ValueError:
            yield match[1].lower(), match[2]


class OverflowCounter:
    """Counts updates skipped on overflow, as DeepSpeed, apex and fairseq report them."""

    def __init__(self) -> None:
        self._count = 0.0
        self._rank = ""

    def parse(self, line: str) -> dict[str, float] | None:
        """The count so far and the new loss scale; empty for a rank that repeats the message, None for other lines."""
        if ("verflow" not in line and "OVERFLOW" not in line) or not _OVERFLOW.search(line):
            return None
        rank = _RANK.search(line)
        self._rank = self._rank or (rank[1] if rank else "")
        if rank and rank[1] != self._rank:
            return {}
        self._count += 1
        row = {"overflow": self._count}
        scale = _SCALE_TO.search(line)
        if scale is None or "hysteresis" in scale[0]:
            scale = _SCALE.search(line)
        if scale and scale[1].rstrip(".").count(".") < 2:
            row["loss scale"] = float(scale[1].rstrip("."))
        return row


MIN_BATCH = 24
"""Consecutive rows of one shape from which they are parsed together."""
MAX_LINE_CHARS = 4096
"""Longer lines are cut."""
MAX_SHAPES = 2048
MAX_SETTINGS_LINES = 3000
"""Only the first lines are searched for settings."""
_DIGITS = re.compile(r"\d+")
_FRAME_CHARS = ("|", "-", "+", "=", "│", "└", "├", "┌", "┃")


class LineReader:
    """Turns lines into rows."""

    def __init__(self, sink: RowSink) -> None:
        self._rows = RowBuilder(sink)
        self._overflows = OverflowCounter()
        self._table_header: TextTableHeader | None = None
        self._shapes: dict[str, LineShape] = {}
        self._recent_shapes: list[LineShape] = []
        self._batch_shape: tuple[LineShape, re.Pattern[str]] | None = None
        self._chatter: set[str] = set()
        self._row_words = ROW_WORDS
        self._settings: dict[str, float | str] = {}
        self._lines_looked_at = 0

    @property
    def text_since_row(self) -> TextSinceRow:
        """The text since the last row."""
        return self._rows.text_since_row

    @property
    def settings(self) -> dict[str, float | str]:
        return {**self._settings, **self._rows.steps.settings}

    def feed(self, body: str) -> None:
        """Read many lines, each with its newline."""
        if self._batch_shape is None:
            for line in body.split("\n"):
                self.line(line)
        else:
            self._match_batch(*self._batch_shape, body)
        best = max(self._recent_shapes, key=lambda shape: shape.seen, default=None)
        if (
            best is not None
            and best.plain
            and best.seen >= MIN_BATCH
            and (self._batch_shape is None or self._batch_shape[0] is not best)
        ):
            self._batch_shape = (best, re.compile(rf"(?:{best.pattern_text})[ \t]*\n|([^\n]*)\n"))
        for shape in self._recent_shapes:
            shape.seen //= 2

    def finish(self) -> None:
        """Release the rows held back for confirmation."""
        self._rows.finish()

    def _match_batch(self, shape: LineShape, pattern: re.Pattern[str], body: str) -> None:
        run: list[tuple[str, ...]] = []
        for texts in pattern.findall(body):
            if texts[0]:
                run.append(texts)
                continue
            if run:
                self._add_run(shape, run)
                run = []
            if texts[-1]:
                self.line(texts[-1])
        if run:
            self._add_run(shape, run)

    def _add_run(self, shape: LineShape, run: list[tuple[str, ...]]) -> None:
        shape.seen += len(run)
        if len(run) >= MIN_BATCH:
            try:
                self._add_run_as_arrays(shape, run)
                return
            except ValueError:
                pass  # one of them is not a number after all
        for texts in run:
            self._add_to_shape(shape, texts[:-1], "")

    def _add_run_as_arrays(self, shape: LineShape, run: list[tuple[str, ...]]) -> None:
        before = (*shape.last, "")
        kept = [row for row, last in zip(run, [before, *run], strict=False) if row != last]
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
        if self._table_header is not None and (row := self._table_header.row(line)) is not None:
            self._rows.hold(self._table_header, row)
            return
        for index, shape in enumerate(self._recent_shapes):
            match = shape.compiled().fullmatch(line)
            if match:
                if index:
                    self._recent_shapes[index - 1], self._recent_shapes[index] = shape, self._recent_shapes[index - 1]
                shape.seen += 1
                self._add_to_shape(shape, match.groups(), line)
                return
        loose = _DIGITS.sub("0", line)
        if loose in self._chatter:
            self._handle_chatter(line)
        elif not self._try_new_shape(line):
            if len(self._chatter) >= 4 * MAX_SHAPES:
                self._chatter.clear()
            self._chatter.add(loose)
            self._handle_chatter(line)

    def _try_new_shape(self, line: str) -> bool:
        """Handle a line of unknown shape; returns whether it is of use."""
        left_out = self._overflows.parse(line)
        if left_out is not None:
            if left_out:
                self._rows.release_held()
                self._rows.put({**self._rows.steps.position, **left_out}, last=False)
            return True
        low = line.lower()
        if not any([word in low for word in self._row_words]) or is_code(line):  # noqa: C419 - a list is faster here
            return False
        tokens = tokenize(line)
        if tokens is None or not tokens.numbers:
            return tokens is not None and self._parse_heading(line)
        shape = self._shapes.get(tokens.key)
        if shape is None:
            shape, texts = shape_of(tokens)
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
                self._row_words = LOSS_WORDS  # too much text that only looks like rows: from here on only losses count
            self._shapes[tokens.key] = shape
        else:
            match = shape.compiled().fullmatch(line)
            texts = match.groups() if match else shape_of(tokens)[1]
            self._remember(shape)
        shape.seen += 1
        if shape.kind is LineKind.CHATTER:
            return False
        self._add_to_shape(shape, texts, line)
        return True

    def _add_to_shape(self, shape: LineShape, texts: tuple[str, ...], line: str) -> None:
        self._rows.add_line(shape, texts, line)
        if shape.kind is LineKind.SINGLE:
            self._look_for_settings(line)

    def _remember(self, shape: LineShape) -> None:
        """Recognise lines of this shape by their pattern from now on, as they came twice."""
        if shape.kind is not LineKind.CHATTER and shape not in self._recent_shapes:
            if len(self._recent_shapes) >= 8:
                self._recent_shapes.pop()
            self._recent_shapes.append(shape)

    def _handle_chatter(self, line: str) -> None:
        """Handle a line that is not a row."""
        self._rows.text_since_row.add(line)
        if not line.lstrip().startswith(_FRAME_CHARS) or not line.strip(" |-+=│┃└├┌"):
            self._rows.close_block()
        self._look_for_settings(line)

    def _look_for_settings(self, line: str) -> None:
        self._lines_looked_at += 1
        if self._lines_looked_at < MAX_SETTINGS_LINES and len(self._settings) < 64:
            for name, value in find_settings(line):
                self._settings.setdefault(name, value)

    def _parse_heading(self, line: str) -> bool:
        """Parse the heading of an evaluation or a table, which says what the lines below it are."""
        if len(line) > 1000:
            return False
        if phase_in(line) == "eval" and line.endswith((":", "*", "=", "-", "#", "results", "metrics")):
            self._rows.close_block()
            self._rows.block.is_eval = True
        elif (columns := TextTableHeader.parse(line)) is not None:
            self._rows.release_held()
            self._table_header = columns
        else:
            return False
        self._rows.text_since_row.add(line)
        return True

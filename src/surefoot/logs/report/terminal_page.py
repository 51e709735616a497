"""The answer as a page in the terminal: one sentence first, then the evidence, then what to do."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from surefoot.logs.log_diagnosis import LogDiagnosis, RankedCause
from surefoot.logs.report.terminal_plot import PlotLine, plot_text, shows_braille
from surefoot.logs.report.wording import (
    COLOURS,
    PATTERN_PHRASES,
    cause_phrase,
    clean,
    format_count,
    onset_sentence,
    ordered_advice,
    source_parts,
)
from surefoot.logs.run_curves import RunCurves

MAX_CAUSES = 3
MAX_EVIDENCE = 8
"""Lines of evidence for the first cause; each cause has its most telling line first."""
MAX_ADVICE = 4
MAX_NOTES = 2
DECISION_PATH_PREFIX = "asked: "
"""How the way through the decision tree begins, which is for those who ask for everything."""
MAX_TEXT_WIDTH = 110
"""Columns beyond which lines of text are no longer comfortable; the plot may be wider."""


def as_text(answer: LogDiagnosis, *, width: int = 80, colour: bool = False, encoding: str | None = "utf-8") -> str:
    """The page as a string: with colour codes only when asked, in characters that the encoding has."""
    return render(page(answer, width=width, fine=shows_braille(encoding)), width=width, colour=colour)


def render(what: RenderableType, *, width: int, colour: bool) -> str:
    """What rich makes of it, without the blanks that it puts at line ends."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(20, width),
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
        _environ={},
    )
    console.print(what, soft_wrap=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def page(answer: LogDiagnosis, *, width: int, fine: bool) -> Group:
    """The parts of the page, top down."""
    parts: list[RenderableType] = [headline(answer)]
    if told := onset_sentence(answer):
        parts.append(Text(told))
    if answer.curves is not None and (drawn := _plot(answer, answer.curves, width, fine)):
        parts += [Text(), *drawn]
    text = min(width, MAX_TEXT_WIDTH)
    if answer.causes:
        parts += [Text(), Text("Why", style="bold"), *_causes(answer.causes[:MAX_CAUSES], text)]
    if steps := ordered_advice(answer.causes[:MAX_CAUSES], MAX_ADVICE):
        parts += [Text(), Text("What to do, in this order", style="bold"), _numbered(steps, text)]
    parts += [Text(), *_small_print(answer, fine)]
    return Group(*parts)


def headline(answer: LogDiagnosis) -> Text:
    """The verdict in a word, for those without colours, and the sentence."""
    colour = COLOURS[answer.verdict]
    sentence = clean(answer.sentence)
    if sentence.lower().startswith(f"{answer.verdict}: "):  # the word stands before it already
        sentence = sentence[len(answer.verdict) + 2 :]
        sentence = sentence[:1].upper() + sentence[1:]
    return Text.assemble((answer.verdict.upper(), f"bold reverse {colour}"), "  ", (sentence, f"bold {colour}"))


def _plot(answer: LogDiagnosis, course: RunCurves, width: int, fine: bool) -> list[Text]:
    curves = [PlotLine(clean(course.loss.name, 40) or "loss", course.loss.steps, course.loss.values, "bold")]
    if len(course.eval_loss):
        label = clean(course.eval_loss.name, 40) or "evaluation"
        curves.append(PlotLine(label, course.eval_loss.steps, course.eval_loss.values, "cyan"))
    onset = None if answer.onset_step is None else float(answer.onset_step)
    return plot_text(curves, width=width, height=7 if width < 120 else 10, onset=onset, unit=course.unit, unicode=fine)


def _causes(causes: tuple[RankedCause, ...], width: int) -> Iterator[RenderableType]:
    """The first with its evidence, the others with one line of theirs."""
    before: set[str] = set()
    for index, one in enumerate(causes):
        told = [clean(line) for line in one.evidence if clean(line) not in before]
        before |= {clean(line) for line in one.evidence}
        words = Text.assemble((cause_phrase(one)[:1].upper() + cause_phrase(one)[1:], "bold" if index == 0 else ""))
        if index == 0:
            yield _indented(words, 2, width)
            yield from (_indented(Text(line[:1].upper() + line[1:]), 4, width) for line in told[:MAX_EVIDENCE])
            if len(told) > MAX_EVIDENCE:
                yield _indented(
                    Text(f"{len(told) - MAX_EVIDENCE} more lines of evidence: --json has them all"), 4, width
                )
        else:
            yield _indented(words.append(f": {told[0]}" if told else ""), 2, width)


def _indented(text: Text, left: int, width: int) -> RenderableType:
    grid = Grid.grid(padding=0)
    grid.add_column(width=max(10, width - left))
    grid.add_row(text)
    return Padding(grid, (0, 0, 0, left))


def _numbered(steps: list[str], width: int) -> RenderableType:
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=4, justify="right")
    grid.add_column(width=max(10, width - 6))
    for number, step in enumerate(steps, 1):
        grid.add_row(Text(f"{number}.", style="bold"), Text(step))
    return grid


def _small_print(answer: LogDiagnosis, fine: bool) -> Iterator[Text]:
    """The small print: notes, and where the numbers came from."""
    notes = [note for note in answer.notes if not note.startswith(DECISION_PATH_PREFIX)]
    for note in notes[:MAX_NOTES]:
        yield Text(f"note: {clean(note, 200)}", style="dim")
    if len(notes) > MAX_NOTES:
        yield Text(f"{len(notes) - MAX_NOTES} more notes: --json has them all", style="dim")
    if parts := source_parts(answer):
        yield Text((" · " if fine else " | ").join(parts), style="dim")


def summary(answers: Sequence[LogDiagnosis], *, width: int = 80, colour: bool = False) -> str:
    """Several answers, a line each."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=7)
    grid.add_column(overflow="fold", min_width=12)
    grid.add_column(overflow="fold", min_width=8)
    grid.add_column(overflow="fold", min_width=6)
    for answer in answers:
        onset = "" if answer.onset_step is None else f"from {format_count(answer.onset_step)}"
        told = PATTERN_PHRASES.get(answer.pattern, "")
        path = Text(clean(answer.source.get("path", ""), 200))
        grid.add_row(
            Text(answer.verdict.upper(), style=f"bold {COLOURS[answer.verdict]}"), path, Text(told), Text(onset)
        )
    return render(Group(Text(f"{len(answers)} logs", style="bold"), grid), width=width, colour=colour)

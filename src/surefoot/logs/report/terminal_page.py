"""The diagnosis as a terminal page: one sentence first, then the evidence, then what to do."""

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
from surefoot.story.incident_block import action_lines, branch_lines

MAX_CAUSES = 3
MAX_EVIDENCE = 8
"""Lines of evidence for the first cause; each cause has its most informative line first."""
MAX_ADVICE = 4
MAX_ACTIONS = 5
"""Actions of the main incident; of more, the last ones."""
MAX_NOTES = 2
DECISION_PATH_PREFIX = "decision path: "
"""Prefix of the note with the path through the decision tree, which only --json shows."""
MAX_TEXT_WIDTH = 110
"""Wider text is hard to read; the plot may be wider."""


def as_text(diagnosis: LogDiagnosis, *, width: int = 80, colour: bool = False, encoding: str | None = "utf-8") -> str:
    """The page as text, in characters that the encoding has; colour codes only if requested."""
    return render(page(diagnosis, width=width, fine=shows_braille(encoding)), width=width, colour=colour)


def render(what: RenderableType, *, width: int, colour: bool) -> str:
    """Render with rich, without trailing blanks."""
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


def page(diagnosis: LogDiagnosis, *, width: int, fine: bool) -> Group:
    """The parts of the page, top down."""
    parts: list[RenderableType] = [headline(diagnosis)]
    if onset_text := onset_sentence(diagnosis):
        parts.append(Text(onset_text))
    if diagnosis.curves is not None and (drawn := _plot(diagnosis, diagnosis.curves, width, fine)):
        parts += [Text(), *drawn]
    text = min(width, MAX_TEXT_WIDTH)
    if diagnosis.causes:
        parts += [Text(), Text("Why", style="bold"), *_causes(diagnosis.causes[:MAX_CAUSES], text)]
    if done := _what_was_done(diagnosis):
        parts += [Text(), Text("What surefoot did", style="bold"), *(_indented(Text(line), 2, text) for line in done)]
    if steps := ordered_advice(diagnosis.causes[:MAX_CAUSES], MAX_ADVICE):
        parts += [Text(), Text("What to do, in this order", style="bold"), _numbered(steps, text)]
    parts += [Text(), *_small_print(diagnosis, fine)]
    return Group(*parts)


def headline(diagnosis: LogDiagnosis) -> Text:
    """The verdict as a word, for terminals without colours, and the sentence."""
    colour = COLOURS[diagnosis.verdict]
    sentence = clean(diagnosis.sentence)
    if sentence.lower().startswith(f"{diagnosis.verdict}: "):  # do not repeat the word
        sentence = sentence[len(diagnosis.verdict) + 2 :]
        sentence = sentence[:1].upper() + sentence[1:]
    return Text.assemble((diagnosis.verdict.upper(), f"bold reverse {colour}"), "  ", (sentence, f"bold {colour}"))


def _plot(diagnosis: LogDiagnosis, course: RunCurves, width: int, fine: bool) -> list[Text]:
    curves = [PlotLine(clean(course.loss.name, 40) or "loss", course.loss.steps, course.loss.values, "bold")]
    if len(course.eval_loss):
        label = clean(course.eval_loss.name, 40) or "evaluation"
        curves.append(PlotLine(label, course.eval_loss.steps, course.eval_loss.values, "cyan"))
    onset = None if diagnosis.onset_step is None else float(diagnosis.onset_step)
    return plot_text(curves, width=width, height=7 if width < 120 else 10, onset=onset, unit=course.unit, unicode=fine)


def _causes(causes: tuple[RankedCause, ...], width: int) -> Iterator[RenderableType]:
    """The first cause with its evidence, the others with one line each."""
    before: set[str] = set()
    for index, cause in enumerate(causes):
        lines = [clean(line) for line in cause.evidence if clean(line) not in before]
        before |= {clean(line) for line in cause.evidence}
        words = Text.assemble((cause_phrase(cause)[:1].upper() + cause_phrase(cause)[1:], "bold" if index == 0 else ""))
        if index == 0:
            yield _indented(words, 2, width)
            yield from (_indented(Text(line[:1].upper() + line[1:]), 4, width) for line in lines[:MAX_EVIDENCE])
            if len(lines) > MAX_EVIDENCE:
                yield _indented(
                    Text(f"{len(lines) - MAX_EVIDENCE} more lines of evidence: --json has them all"), 4, width
                )
        else:
            yield _indented(words.append(f": {lines[0]}" if lines else ""), 2, width)


def _what_was_done(diagnosis: LogDiagnosis) -> list[str]:
    """Of a surefoot run: what was done about its main incident, the branches of its trials, and where to read on."""
    main = None if diagnosis.story is None else diagnosis.story.main
    if main is None or not diagnosis.is_trouble:
        return []
    lines = action_lines(main)[-MAX_ACTIONS:]
    lines += [f"trial: {line}" for line in branch_lines(main)]
    if main.outcome:
        lines.append(f"result: {main.outcome}")
    if main.bundle:
        lines.append(f"incident bundle: {main.bundle}")
    return [clean(line[:1].upper() + line[1:]) for line in lines]


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


def _small_print(diagnosis: LogDiagnosis, fine: bool) -> Iterator[Text]:
    """Notes, and where the numbers came from."""
    notes = [note for note in diagnosis.notes if not note.startswith(DECISION_PATH_PREFIX)]
    for note in notes[:MAX_NOTES]:
        yield Text(f"note: {clean(note, 200)}", style="dim")
    if len(notes) > MAX_NOTES:
        more = len(notes) - MAX_NOTES
        yield Text(f"{more} more {'note' if more == 1 else 'notes'} with --json", style="dim")
    if parts := source_parts(diagnosis):
        yield Text((" · " if fine else " | ").join(parts), style="dim")


def summary(diagnoses: Sequence[LogDiagnosis], *, width: int = 80, colour: bool = False) -> str:
    """Several diagnoses, one line each."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=7)
    grid.add_column(overflow="fold", min_width=12)
    grid.add_column(overflow="fold", min_width=8)
    grid.add_column(overflow="fold", min_width=6)
    for diagnosis in diagnoses:
        onset = "" if diagnosis.onset_step is None else f"from {format_count(diagnosis.onset_step)}"
        pattern = PATTERN_PHRASES.get(diagnosis.pattern, "")
        path = Text(clean(diagnosis.source.get("path", ""), 200))
        grid.add_row(
            Text(diagnosis.verdict.upper(), style=f"bold {COLOURS[diagnosis.verdict]}"),
            path,
            Text(pattern),
            Text(onset),
        )
    return render(Group(Text(f"{len(diagnoses)} logs", style="bold"), grid), width=width, colour=colour)

"""`surefoot cases`: the incidents of all runs below a folder, or of a case library, and what helped."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from surefoot.cases.case_library import CaseLibrary, NoCases, load_cases, write_library
from surefoot.cases.case_record import Case
from surefoot.journal.output_files import OutputRefused
from surefoot.journal.strict_json import dumps
from surefoot.kinds import Cause

FINE, USAGE = 0, 2
MAX_ROWS = 200
"""Cases that are shown in the table, the newest of each run last."""
MAX_NOTES_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CasesOptions:
    cause: str = ""
    model: str = ""
    export: Path | None = None
    as_json: bool = False


def show(path: Path, options: CasesOptions) -> int:
    """List the cases, and write a library if one was asked for."""
    try:
        _check_cause(options.cause)
        library = load_cases(path)
        cases = [case for case in library.cases if _matches(case, options)]
        if options.export is not None:
            _export(options.export, cases)
    except (NoCases, OutputRefused) as error:
        typer.echo(f"surefoot cases: {error}", err=True)
        return USAGE
    except OSError as error:
        typer.echo(f"surefoot cases: {error.filename or path}: {error.strerror or error}", err=True)
        return USAGE
    if options.as_json:
        groups = [{"group": name, **_counts(group)} for name, group in _groups(cases)]
        content = {"runs": library.num_runs, "cases": [c.as_json() for c in cases], "groups": groups}
        sys.stdout.write(dumps(content | {"notes": library.notes}) + "\n")
    else:
        _print(cases, library, options)
    return FINE


def _check_cause(cause: str) -> None:
    known = sorted(member.value for member in Cause)
    if cause and cause not in known:
        raise NoCases(f"--cause {cause!r} is unknown. The causes are {', '.join(known)}")


def _matches(case: Case, options: CasesOptions) -> bool:
    """The model filter is part of the family or the class, in any case of letters."""
    wanted = options.model.lower()
    model = not wanted or wanted in case.family.lower() or wanted in case.model.lower()
    return model and (not options.cause or options.cause == case.cause)


def _export(path: Path, cases: Sequence[Case]) -> None:
    """Never over a file that is something else."""
    if path.exists():
        if not path.is_file():
            raise OutputRefused(f"{path} is not a file. Name another with --export")
        try:
            load_cases(path)
        except NoCases:
            raise OutputRefused(f"{path} exists and is no case library. Name another file with --export") from None
    write_library(path, cases)


def _print(cases: Sequence[Case], library: CaseLibrary, options: CasesOptions) -> None:
    console = Console(highlight=False)
    runs = "run" if library.num_runs == 1 else "runs"
    where = f" in {library.num_runs:,} {runs}" if library.num_runs else ""
    noun = "incident" if len(cases) == 1 else "incidents"
    console.print(Text(f"{len(cases):,} {noun}{where}"))
    if cases:
        console.print(_table(cases[:MAX_ROWS]))
        if len(cases) > MAX_ROWS:
            console.print(Text(f"and {len(cases) - MAX_ROWS:,} more, with --json"))
        console.print()
        for name, group in _groups(cases):
            console.print(Text(f"{name}: {_summary(group)}"))
    if options.export is not None:
        console.print(Text(f"{len(cases):,} cases written to {options.export}"))
    for note in library.notes[:MAX_NOTES_SHOWN]:
        console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)
    if len(library.notes) > MAX_NOTES_SHOWN:
        console.print(Text(f"and {len(library.notes) - MAX_NOTES_SHOWN} more notes, with --json", style="dim"))


def _table(cases: Sequence[Case]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("run, step", "what happened", "model", "tried", "helped", "loss"):
        table.add_column(heading, overflow="fold")
    for case in cases:
        origin = " in ".join(filter(None, (case.operation, case.module)))
        happened = f"{_words(case.cause)} ({case.confidence:.0%}): {_words(', '.join(case.findings))}"
        tried = ", ".join(case.actions)
        if case.branches:
            tried += f"; trial: {_words(', '.join(case.branches))}"
        if case.banned:
            tried += f"; {case.banned} samples banned"
        table.add_row(
            *map(
                Text,
                (
                    f"{case.run}, {case.step}",
                    happened + (f"; {origin}" if origin else ""),
                    f"{case.model or '?'} ({_kind(case)})",
                    tried or "nothing",
                    _helped(case),
                    f"{_loss(case.loss_before)} to {_loss(case.loss_after)}",
                ),
            )
        )
    return table


def _helped(case: Case) -> str:
    if case.helped is None:
        return "not known"
    return f"{'yes' if case.helped else 'no'}: {_words(case.remedy)}" if case.remedy else "yes" if case.helped else "no"


def _groups(cases: Sequence[Case]) -> list[tuple[str, list[Case]]]:
    """By cause, family and optimizer; the largest group first."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(f"{case.cause} x {_kind(case)}", []).append(case)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))


def _counts(group: Sequence[Case]) -> dict[str, object]:
    by = Counter(case.remedy or "nothing" for case in group if case.helped)
    known = [case for case in group if case.helped is not None]
    return {"incidents": len(group), "known": len(known), "helped": sum(by.values()), "by": dict(by.most_common())}


def _summary(group: Sequence[Case]) -> str:
    by = Counter(case.remedy or "nothing" for case in group if case.helped)
    failed = Counter(case.remedy or "nothing" for case in group if case.helped is False)
    text = f"{len(group)} incident{'s' if len(group) > 1 else ''}"
    if by:
        text += f", {sum(by.values())} helped by {_tally(by)}"
    if failed:
        text += f", {sum(failed.values())} not helped by {_tally(failed)}"
    unknown = len(group) - sum(by.values()) - sum(failed.values())
    return text + (f", {unknown} with no known outcome" if unknown else "")


def _tally(counts: Counter[str]) -> str:
    return ", ".join(f"{_words(name)} ({count})" for name, count in counts.most_common())


def _kind(case: Case) -> str:
    return f"{case.family or '?'}/{case.optimizer or '?'}"


def _loss(loss: float | None) -> str:
    return "?" if loss is None else f"{loss:.4g}"


def _words(name: str) -> str:
    return name.replace("_", " ")

"""`surefoot diagnose` on the console: what went wrong in a log, when it began, and what to do."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from surefoot.journal.output_files import OutputRefused, check_output
from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth, UnreadableInput

if TYPE_CHECKING:
    from rich.progress import TaskID

FINE, TROUBLE, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
ON = {"failed": frozenset({RunHealth.FAILED}), "warning": frozenset({RunHealth.FAILED, RunHealth.WARNING})}
"""Verdicts at which --follow exits, by the value of --on."""
LARGE_FILE = 1 << 25
"""Bytes from which a progress bar is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseOptions:
    """Options of the command."""

    as_json: bool = False
    plot: Path | None = None
    html: Path | None = None
    force: bool = False
    """Overwrite the files named by plot and html even if surefoot did not write them."""
    compare: bool = False
    follow: bool = False
    on: str = "failed"
    timeout: float | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


def show(paths: Sequence[str], options: DiagnoseOptions) -> int:
    """Diagnose each log and print the result; the worst of them gives the exit code."""
    return with_exit_code(lambda: _show(paths, options))


def with_exit_code(work: Callable[[], int], command: str = "diagnose") -> int:
    """Turn every error into an exit code and one message, never a traceback."""
    try:
        return work()
    except (UnreadableInput, OutputRefused) as error:
        print_error(str(error), command)
    except BrokenPipeError:
        # The reader of the pipe left, as after `| head`; Python would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError:
        print_error(
            "not enough memory to read this. Pass a part of it: tail -n 100000 LOG | surefoot diagnose -", command
        )
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown line"
        details = f"{type(error).__name__}: {error}"[:300]
        print_error(
            f"a bug in surefoot, not in your log ({details}, in {where}). Please report it with the log", command
        )
    return UNUSABLE


def print_error(message: str, command: str = "diagnose") -> None:
    print(_printable(f"surefoot {command}: {message}", sys.stderr.encoding), file=sys.stderr)


def print_notice(message: str) -> None:
    """To standard error: standard output is for the diagnosis."""
    print(_printable(message, sys.stderr.encoding), file=sys.stderr)


def print_text(text: str) -> None:
    """Write to standard output at once, replacing what its encoding cannot hold."""
    sys.stdout.write(_printable(text, sys.stdout.encoding))
    sys.stdout.flush()


def _printable(text: str, encoding: str | None) -> str:
    return text.encode(encoding or "utf-8", "replace").decode(encoding or "utf-8", "replace")


def _show(paths: Sequence[str], options: DiagnoseOptions) -> int:
    if options.plot is not None:
        from surefoot.logs.report.matplotlib_plot import check_can_draw

        check_can_draw(options.plot)
    _check_targets(paths, options)
    if options.compare:
        return _compare(paths, options)
    if options.follow:
        return _follow(paths, options)
    return _diagnose(paths, options)


def _check_targets(paths: Sequence[str], options: DiagnoseOptions) -> None:
    """Refuse files that must not be written before a long log is read, not after."""
    count = 1 if options.compare or options.follow else len(paths)
    targets = [path for named in (options.plot, options.html) if named is not None for path in _numbered(named, count)]
    for target in targets:
        check_output(target, inputs=paths, force=options.force)
    if len({os.path.realpath(target) for target in targets}) < len(targets):
        raise OutputRefused(f"--plot and --html both name {options.plot}. Name two files")


def _compare(paths: Sequence[str], options: DiagnoseOptions) -> int:
    if len(paths) != 2 or options.follow:
        raise UnreadableInput(f"--compare takes two finished logs, not {len(paths)}, and no --follow")
    from surefoot.logs.report import comparison_page
    from surefoot.logs.report.comparison import compare_logs

    first, second = (diagnose_file(path, options.columns) for path in paths)
    comparison = compare_logs(first, second)
    width, colour = terminal()
    text = comparison_page.as_text(comparison, width=width, colour=colour, encoding=sys.stdout.encoding)
    print_text(as_json(comparison.as_json()) if options.as_json else text)
    if options.plot is not None:
        comparison_page.draw(comparison, options.plot, inputs=paths, force=options.force)
        print_notice(f"plot written to {options.plot}")
    if options.html is not None:
        comparison_page.write(comparison, options.html, inputs=paths, force=options.force)
        print_notice(f"page written to {options.html}")
    return TROUBLE if comparison.is_trouble else FINE


def _follow(paths: Sequence[str], options: DiagnoseOptions) -> int:
    if len(paths) != 1:
        raise UnreadableInput(f"--follow takes one log, not {len(paths)}")
    if options.on not in ON:
        raise UnreadableInput(f"--on {options.on} is unknown. Use {' or '.join(ON)}")
    from surefoot.logs.follow.follow import follow, open_log

    path = paths[0]
    log = open_log(path, columns=options.columns)
    if path != "-" and not os.path.exists(path):
        print_notice(f"{path} does not exist yet: waiting for it")
    reported: list[LogDiagnosis] = []

    def report(answer: LogDiagnosis) -> None:
        reported.append(answer)
        print_text(json.dumps(answer.as_json(), allow_nan=False) + "\n" if options.as_json else _line(answer))

    try:
        last = follow(log, on_news=report, until=ON[options.on], timeout=options.timeout)
    finally:
        log.close()
    if last is None:
        raise UnreadableInput(f"{path}: nothing readable was written to it")
    if not options.as_json:
        print_text("\n" if reported else "")
        _pages([last])
    elif not any(last is answer for answer in reported):
        print_text(json.dumps(last.as_json(), allow_nan=False) + "\n")
    _write([last], options, paths)
    return TROUBLE if last.verdict in ON[options.on] else FINE


def _line(answer: LogDiagnosis) -> str:
    """A diagnosis in one line, with the time of day."""
    from surefoot.logs.report.wording import clean

    return f"{time.strftime('%H:%M:%S')}  {answer.verdict.upper():<8} {clean(answer.sentence)}\n"


def _diagnose(paths: Sequence[str], options: DiagnoseOptions) -> int:
    answers: list[LogDiagnosis] = []
    unreadable = 0
    for path in paths:
        try:
            answers.append(diagnose_file(path, options.columns))
        except UnreadableInput as error:
            if len(paths) == 1:
                raise
            print_error(str(error))
            unreadable += 1
            answers.append(
                LogDiagnosis(verdict=RunHealth.UNKNOWN, sentence=str(error), source={"path": path}, notes=(str(error),))
            )
    if options.as_json:
        print_text(as_json([answer.as_json() for answer in answers] if len(paths) > 1 else answers[0].as_json()))
    else:
        _pages(answers)
    _write(answers, options, paths)
    if unreadable:
        return UNUSABLE
    return TROUBLE if any(answer.is_trouble for answer in answers) else FINE


def diagnose_file(path: str, columns: Mapping[str, str]) -> LogDiagnosis:
    from surefoot.logs.diagnose_log import diagnose

    with _progress():
        return diagnose(path, columns=columns or None)


@contextmanager
def _progress() -> Iterator[None]:
    """A progress bar while a large file is read, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from surefoot.logs.formats.log_source import report_progress

    columns = (TextColumn("reading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def advance(path: str, count: int, size: int) -> None:
        if size < LARGE_FILE:
            return
        if path not in tasks:
            tasks[path] = bar.add_task(escape(Path(path).name), total=size)
            bar.start()
        bar.update(tasks[path], advance=count, total=size)

    try:
        with report_progress(advance):
            yield
    finally:
        bar.stop()


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def terminal() -> tuple[int, bool]:
    """The width of standard output, and whether it supports colours."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if not sys.stdout.isatty():
        return (int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else 80), False
    return shutil.get_terminal_size().columns, colour


def _pages(answers: Sequence[LogDiagnosis]) -> None:
    from surefoot.logs.report.terminal_page import as_text, summary

    width, colour = terminal()
    for answer in answers:
        print_text(
            as_text(answer, width=width, colour=colour, encoding=sys.stdout.encoding) + "\n" * (len(answers) > 1)
        )
    if len(answers) > 1:
        print_text(summary(answers, width=width, colour=colour))


def _write(answers: Sequence[LogDiagnosis], options: DiagnoseOptions, inputs: Sequence[str]) -> None:
    """Write the --plot and --html files; several diagnoses go to numbered files."""
    if options.plot is not None:
        from surefoot.logs.report.matplotlib_plot import draw_picture

        for answer, path in zip(answers, _numbered(options.plot, len(answers)), strict=True):
            draw_picture(answer, path, inputs=inputs, force=options.force)
            print_notice(f"plot written to {path}")
    if options.html is not None:
        from surefoot.logs.report.html_page import write_page

        for answer, path in zip(answers, _numbered(options.html, len(answers)), strict=True):
            write_page(answer, path, inputs=inputs, force=options.force)
            print_notice(f"page written to {path}")


def _numbered(path: Path, count: int) -> list[Path]:
    """A file name for each of several diagnoses; a single one gets `path` itself."""
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{number}") for number in range(1, count + 1)]

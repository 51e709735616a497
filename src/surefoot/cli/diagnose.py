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
"""Verdicts at which --follow ends, by what --on says."""
LARGE = 1 << 25
"""Bytes from which on reading a file takes long enough to show how far it has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the options asked for."""

    as_json: bool = False
    plot: Path | None = None
    html: Path | None = None
    force: bool = False
    """Replace the files named by plot and html even where surefoot did not write them."""
    compare: bool = False
    follow: bool = False
    on: str = "failed"
    timeout: float | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


def show(paths: Sequence[str], wishes: Wishes) -> int:
    """Judge each log and print what there is to say; the worst of them gives the exit code."""
    return guarded(lambda: _show(paths, wishes))


def guarded(work: Callable[[], int]) -> int:
    """Whatever happens inside ends in an exit code and at most one message, never in a traceback."""
    try:
        return work()
    except (UnreadableInput, OutputRefused) as wrong:
        complain(str(wrong))
    except BrokenPipeError:
        # Nobody reads on, as after `| head`; Python would complain again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError:
        complain("there is not enough memory to read this. Pass a part of it: tail -n 100000 LOG | surefoot diagnose -")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
        told = f"{type(error).__name__}: {error}"[:300]
        complain(f"an error of surefoot's own, not of your log ({told}, in {where}). Please report it with the log")
    return UNUSABLE


def complain(message: str) -> None:
    print(_printable(f"surefoot diagnose: {message}", sys.stderr.encoding), file=sys.stderr)


def say(text: str) -> None:
    """Print to standard output what its encoding can hold, all at once."""
    sys.stdout.write(_printable(text, sys.stdout.encoding))
    sys.stdout.flush()


def _printable(text: str, encoding: str | None) -> str:
    return text.encode(encoding or "utf-8", "replace").decode(encoding or "utf-8", "replace")


def _show(paths: Sequence[str], wishes: Wishes) -> int:
    if wishes.plot is not None:
        from surefoot.logs.report.matplotlib_plot import check_can_draw

        check_can_draw(wishes.plot)
    _check_targets(paths, wishes)
    if wishes.compare:
        return _compared(paths, wishes)
    if wishes.follow:
        return _followed(paths, wishes)
    return _answered(paths, wishes)


def _check_targets(paths: Sequence[str], wishes: Wishes) -> None:
    """Refuse files that must not be written before a long log is read, not after."""
    count = 1 if wishes.compare or wishes.follow else len(paths)
    targets = [path for named in (wishes.plot, wishes.html) if named is not None for path in _numbered(named, count)]
    for target in targets:
        check_output(target, inputs=paths, force=wishes.force)
    if len({os.path.realpath(target) for target in targets}) < len(targets):
        raise OutputRefused(f"--plot and --html both name {wishes.plot}. Name two files")


def _compared(paths: Sequence[str], wishes: Wishes) -> int:
    if len(paths) != 2 or wishes.follow:
        raise UnreadableInput(
            f"--compare takes two logs that are finished: here {'are' if len(paths) > 1 else 'is'} {len(paths)}"
        )
    from surefoot.logs.report import comparison_page
    from surefoot.logs.report.comparison import compare_logs

    first, second = (judged(path, wishes.columns) for path in paths)
    found = compare_logs(first, second)
    width, colour = terminal()
    text = comparison_page.as_text(found, width=width, colour=colour, encoding=sys.stdout.encoding)
    say(as_json(found.as_json()) if wishes.as_json else text)
    if wishes.plot is not None:
        comparison_page.draw(found, wishes.plot, inputs=paths, force=wishes.force)
        tell(f"picture written to {wishes.plot}")
    if wishes.html is not None:
        comparison_page.write(found, wishes.html, inputs=paths, force=wishes.force)
        tell(f"page written to {wishes.html}")
    return TROUBLE if found.is_trouble else FINE


def _followed(paths: Sequence[str], wishes: Wishes) -> int:
    if len(paths) != 1:
        raise UnreadableInput(f"--follow takes one log: here are {len(paths)}")
    if wishes.on not in ON:
        raise UnreadableInput(f"--on {wishes.on} is unknown. Use {' or '.join(ON)}")
    from surefoot.logs.follow.follow import follow, open_log

    path = paths[0]
    log = open_log(path, columns=wishes.columns)
    if path != "-" and not os.path.exists(path):
        tell(f"{path} is not there yet: waiting for it")
    spoken: list[LogDiagnosis] = []

    def speak(answer: LogDiagnosis) -> None:
        spoken.append(answer)
        say(json.dumps(answer.as_json(), allow_nan=False) + "\n" if wishes.as_json else _line(answer))

    try:
        last = follow(log, on_news=speak, until=ON[wishes.on], timeout=wishes.timeout)
    finally:
        log.close()
    if last is None:
        raise UnreadableInput(f"{path}: nothing came that could be read")
    if not wishes.as_json:
        say("\n" if spoken else "")
        _pages([last])
    elif not any(last is one for one in spoken):
        say(json.dumps(last.as_json(), allow_nan=False) + "\n")
    _write([last], wishes, paths)
    return TROUBLE if last.verdict in ON[wishes.on] else FINE


def _line(answer: LogDiagnosis) -> str:
    """A finding in one line, with the time of day."""
    from surefoot.logs.report.wording import clean

    return f"{time.strftime('%H:%M:%S')}  {answer.verdict.upper():<8} {clean(answer.sentence)}\n"


def _answered(paths: Sequence[str], wishes: Wishes) -> int:
    answers: list[LogDiagnosis] = []
    unreadable = 0
    for path in paths:
        try:
            answers.append(judged(path, wishes.columns))
        except UnreadableInput as wrong:
            if len(paths) == 1:
                raise
            complain(str(wrong))
            unreadable += 1
            answers.append(
                LogDiagnosis(verdict=RunHealth.UNKNOWN, sentence=str(wrong), source={"path": path}, notes=(str(wrong),))
            )
    if wishes.as_json:
        say(as_json([answer.as_json() for answer in answers] if len(paths) > 1 else answers[0].as_json()))
    else:
        _pages(answers)
    _write(answers, wishes, paths)
    if unreadable:
        return UNUSABLE
    return TROUBLE if any(answer.is_trouble for answer in answers) else FINE


def judged(path: str, columns: Mapping[str, str]) -> LogDiagnosis:
    from surefoot.logs.diagnose_log import diagnose

    with _progress():
        return diagnose(path, columns=columns or None)


@contextmanager
def _progress() -> Iterator[None]:
    """A bar while a large file is read, if somebody sits before a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from surefoot.logs.formats.log_source import report_progress

    columns = (TextColumn("reading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def tell(path: str, more: int, size: int) -> None:
        if size < LARGE:
            return
        if path not in tasks:
            tasks[path] = bar.add_task(escape(Path(path).name), total=size)
            bar.start()
        bar.update(tasks[path], advance=more, total=size)

    try:
        with report_progress(tell):
            yield
    finally:
        bar.stop()


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def terminal() -> tuple[int, bool]:
    """How wide standard output is, and whether it takes colours."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if not sys.stdout.isatty():
        return (int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else 80), False
    return shutil.get_terminal_size().columns, colour


def _pages(answers: Sequence[LogDiagnosis]) -> None:
    from surefoot.logs.report.terminal_page import as_text, summary

    width, colour = terminal()
    for answer in answers:
        say(as_text(answer, width=width, colour=colour, encoding=sys.stdout.encoding) + "\n" * (len(answers) > 1))
    if len(answers) > 1:
        say(summary(answers, width=width, colour=colour))


def _write(answers: Sequence[LogDiagnosis], wishes: Wishes, inputs: Sequence[str]) -> None:
    """The files that were asked for; several answers go to several files."""
    if wishes.plot is not None:
        from surefoot.logs.report.matplotlib_plot import draw_picture

        for answer, path in zip(answers, _numbered(wishes.plot, len(answers)), strict=True):
            draw_picture(answer, path, inputs=inputs, force=wishes.force)
            tell(f"picture written to {path}")
    if wishes.html is not None:
        from surefoot.logs.report.html_page import write_page

        for answer, path in zip(answers, _numbered(wishes.html, len(answers)), strict=True):
            write_page(answer, path, inputs=inputs, force=wishes.force)
            tell(f"page written to {path}")


def tell(message: str) -> None:
    """Good news, on standard error as well: standard output belongs to the answer."""
    print(_printable(message, sys.stderr.encoding), file=sys.stderr)


def _numbered(path: Path, count: int) -> list[Path]:
    """The file for each of several answers; one answer goes to the file itself."""
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{number}") for number in range(1, count + 1)]

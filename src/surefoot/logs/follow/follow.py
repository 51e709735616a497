"""Follows a log while it grows: diagnoses it again and again, and reports each trouble once, when it is confirmed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.follow.growing_log import LINE_FORMATS, MAX_REREAD_BYTES, FileTail, GrowingLog, PipeTail, RereadLog
from surefoot.logs.formats import detect
from surefoot.logs.formats.console import console_log
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth, UnreadableInput
from surefoot.logs.table import LogTable
from surefoot.records import Pattern

PERMANENT = frozenset({Pattern.NONFINITE, Pattern.COLLAPSE_TO_ZERO})
"""Failures that do not recover."""
MIN_LOSSES_PERMANENT, MIN_LOSSES_TRANSIENT = 3, 10
"""Losses that must follow a failure before it is confirmed: a permanent one, and one that may recover."""


@dataclass(frozen=True, slots=True)
class ReportedTrouble:
    """A trouble already reported, and how far the log went then."""

    verdict: RunHealth
    pattern: str
    last: float


class NewsFilter:
    """Decides what is news: each trouble once, unless it began again after it was reported."""

    def __init__(self) -> None:
        self._reported: list[ReportedTrouble] = []
        self._state = RunHealth.UNKNOWN

    def is_news(self, diagnosis: LogDiagnosis) -> bool:
        """Whether this diagnosis has not been reported yet."""
        before, self._state = self._state, diagnosis.verdict
        if diagnosis.verdict is RunHealth.HEALTHY:
            return before in (RunHealth.WARNING, RunHealth.FAILED)
        if not diagnosis.is_trouble:
            return False
        last = float(diagnosis.last_step or 0)
        onset = float(diagnosis.onset_step or 0)
        known = [
            trouble
            for trouble in self._reported
            if (trouble.verdict, trouble.pattern) == (diagnosis.verdict, str(diagnosis.pattern))
        ]
        new = all(onset > trouble.last for trouble in known)
        if new:
            self._reported.append(ReportedTrouble(diagnosis.verdict, str(diagnosis.pattern), last))
        return new


class FailureConfirmer:
    """Decides whether a failure is confirmed: enough losses followed its onset, or no more come.

    A loss that jumped may recover, and a script that kills the run cannot undo that; a NaN stays.
    """

    def __init__(self) -> None:
        self._seen: int | None = None
        """The number of losses when the failure was first seen."""
        self._new = True

    def is_confirmed(self, diagnosis: LogDiagnosis, *, quiet: bool, over: bool) -> bool:
        """`quiet`: no line for a moment; `over`: no further line is expected."""
        new, self._new = self._new, False
        if diagnosis.verdict is not RunHealth.FAILED:
            self._seen = None
            return True
        if over or diagnosis.curves is None:
            return True
        if diagnosis.pattern is Pattern.NONE:  # an exception, which the run may have survived
            return quiet
        steps = diagnosis.curves.loss.steps
        since = len(steps) if self._seen is None else self._seen
        self._seen = since
        lasts = diagnosis.pattern in PERMANENT
        if diagnosis.onset_step is not None and (lasts or new):  # do not wait for a failure that was there before
            since = min(since, int((steps <= diagnosis.onset_step).sum()))
        wanted = MIN_LOSSES_PERMANENT if lasts else max(MIN_LOSSES_TRANSIENT, len(steps) // 20)
        return len(steps) - since >= wanted


QUIET_SECONDS = 2.0
"""Seconds after which a last line without a newline counts as complete."""
SILENT_SECONDS = 120.0
"""Seconds of silence after which no more lines are expected, and an unconfirmed failure is reported."""
MIN_INTERVAL, MAX_LOAD_FACTOR = 1.0, 12.0
"""Least seconds between diagnoses, also as a multiple of the time one takes."""


class FollowedLog(Protocol):
    """A log that may have grown since the last call."""

    @property
    def ended(self) -> bool: ...

    def grown(self) -> bool: ...

    def diagnose(self, *, quiet: bool) -> LogDiagnosis | None: ...

    def close(self) -> None: ...


def follow(
    log: FollowedLog,
    *,
    on_news: Callable[[LogDiagnosis], None],
    until: frozenset[RunHealth],
    timeout: float | None = None,
    poll: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> LogDiagnosis | None:
    """Diagnose a log as it grows until its verdict is in `until`, it ends, or it is silent for too long."""
    news_filter, confirmer = NewsFilter(), FailureConfirmer()
    diagnosis: LogDiagnosis | None = None
    last_growth, due, waiting = clock(), clock(), False
    judged_quiet, over = True, False
    while True:
        now = clock()
        if log.grown():
            last_growth, waiting, judged_quiet = now, True, False
        quiet = log.ended or now - last_growth >= QUIET_SECONDS
        judged = (waiting and now >= due) or log.ended or (quiet and not judged_quiet and now >= due)
        if judged:
            started = clock()
            diagnosis = log.diagnose(quiet=quiet) or diagnosis
            waiting, judged_quiet = False, quiet
            due = now + max(MIN_INTERVAL, MAX_LOAD_FACTOR * (clock() - started))
        before, over = over, log.ended or now - last_growth >= SILENT_SECONDS
        if (
            diagnosis is not None
            and (judged or over > before)
            and confirmer.is_confirmed(diagnosis, quiet=quiet, over=over)
        ):
            if news_filter.is_news(diagnosis):
                on_news(diagnosis)
            if diagnosis.verdict in until:
                return diagnosis
        if log.ended or (timeout is not None and now - last_growth >= timeout):
            return diagnosis
        sleep(poll)


def open_log(path: str, *, columns: Mapping[str, str]) -> FollowedLog:
    """Open what is at a path for following; does not wait for it."""

    def judge(source: LogTable | str) -> LogDiagnosis:
        return diagnose(source, columns=columns or None)

    if path == "-":
        return GrowingLog(PipeTail(sys.stdin.buffer), path, _read, judge)
    if os.path.isdir(path) or _is_rewritten_whole(path):
        return RereadLog(path, judge)
    return GrowingLog(FileTail(path), path, _read, judge)


def _read(source: LogSource) -> list[LogTable]:
    """Read the tables in the given bytes; JSON or CSV that turns out to be neither is text."""
    kind = detect.detect_format(source.head)
    reader = next((module for module in detect.READERS if kind == module.FORMAT), console_log)
    tables = reader.read(source)
    return tables if isinstance(tables, list) else [tables]


def _is_rewritten_whole(path: str) -> bool:
    """Whether a file is not written line by line: a JSON document, an event file, a checkpoint."""
    if not os.path.isfile(path) or not os.path.getsize(path):
        return False
    try:
        with LogSource.open(path) as source:
            kind = detect.detect_format(source.head)
            if kind not in LINE_FORMATS:
                return True
        return os.path.getsize(path) < MAX_REREAD_BYTES and all(
            table.format not in LINE_FORMATS for table in detect.read_file(path)
        )
    except UnreadableInput:
        return False

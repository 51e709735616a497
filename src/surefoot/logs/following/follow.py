"""A log judged while it grows: speaks when trouble comes, once for each."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from surefoot.logs.answer import LogDiagnosis, RunHealth
from surefoot.logs.diagnosing import diagnose
from surefoot.logs.following.growing import LINE_FORMATS, MAX_REREAD_BYTES, GrowingLog, RereadLog
from surefoot.logs.following.tail import FileTail, PipeTail
from surefoot.logs.following.voice import FailureConfirmer, NewsFilter
from surefoot.logs.reading import door
from surefoot.logs.reading.console import textlog
from surefoot.logs.reading.source import LogSource
from surefoot.logs.table import LogTable, UnreadableInput

QUIET_SECONDS = 2.0
"""Seconds after which a last line without an end is taken for whole."""
SILENT_SECONDS = 120.0
"""Seconds of silence after which no more is expected: what was only feared is said."""
OFTEN, SHARE = 1.0, 12.0
"""Judged at most once in so many seconds, and once in so many times of what judging takes."""


class FollowedLog(Protocol):
    """A log that may have grown since it was last asked."""

    @property
    def ended(self) -> bool: ...

    def grown(self) -> bool: ...

    def answer(self, *, quiet: bool) -> LogDiagnosis | None: ...

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
    """Judge a log as it grows, until it has a verdict of `until`, ends, or is silent for too long; the last answer."""
    voice, firm = NewsFilter(), FailureConfirmer()
    answer: LogDiagnosis | None = None
    heard, due, waiting = clock(), clock(), False
    judged_quiet, over = True, False
    while True:
        now = clock()
        if log.grown():
            heard, waiting, judged_quiet = now, True, False
        quiet = log.ended or now - heard >= QUIET_SECONDS
        judged = (waiting and now >= due) or log.ended or (quiet and not judged_quiet and now >= due)
        if judged:
            started = clock()
            answer = log.answer(quiet=quiet) or answer
            waiting, judged_quiet = False, quiet
            due = now + max(OFTEN, SHARE * (clock() - started))
        before, over = over, log.ended or now - heard >= SILENT_SECONDS
        if answer is not None and (judged or over > before) and firm.is_confirmed(answer, quiet=quiet, over=over):
            if voice.is_news(answer):
                on_news(answer)
            if answer.verdict in until:
                return answer
        if log.ended or (timeout is not None and now - heard >= timeout):
            return answer
        sleep(poll)


def open_log(path: str, *, columns: Mapping[str, str]) -> FollowedLog:
    """The right way to follow what is at a path; waits for nothing."""

    def judge(source: LogTable | str) -> LogDiagnosis:
        return diagnose(source, columns=columns or None)

    if path == "-":
        return GrowingLog(PipeTail(sys.stdin.buffer), path, _read, judge)
    if os.path.isdir(path) or _written_whole(path):
        return RereadLog(path, judge)
    return GrowingLog(FileTail(path), path, _read, judge)


def _read(source: LogSource) -> list[LogTable]:
    """The tables in bytes at hand; JSON or CSV that turns out to be none is text."""
    kind = door.detect_format(source.head)
    reader = next((one for one in door.READERS if kind == one.FORMAT), textlog)
    found = reader.read(source)
    return found if isinstance(found, list) else [found]


def _written_whole(path: str) -> bool:
    """Whether a file is of a format that is not written line by line: a JSON document, an event file, a checkpoint."""
    if not os.path.isfile(path) or not os.path.getsize(path):
        return False
    try:
        with LogSource.open(path) as source:
            kind = door.detect_format(source.head)
            if kind not in LINE_FORMATS:
                return True
        return os.path.getsize(path) < MAX_REREAD_BYTES and all(one.format not in LINE_FORMATS for one in door.read_file(path))
    except UnreadableInput:
        return False

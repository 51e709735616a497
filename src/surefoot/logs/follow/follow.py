"""What is worth saying about a log that grows: what is new, and what is to be believed yet. // A log judged while it grows: speaks when trouble comes, once for each."""

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
"""Failures that do not pass."""
MORE, LONGER = 3, 10
"""Losses that have to come after a failure before it is believed: one that does not pass, and one that may."""


@dataclass(frozen=True, slots=True)
class ReportedTrouble:
    """A trouble that was told: what it was, and how far the log went then."""

    verdict: RunHealth
    pattern: str
    last: float


class NewsFilter:
    """Knows what was told already: each trouble once, unless it began anew after that."""

    def __init__(self) -> None:
        self._reported: list[ReportedTrouble] = []
        self._state = RunHealth.UNKNOWN

    def is_news(self, answer: LogDiagnosis) -> bool:
        """Whether there is something new to say."""
        before, self._state = self._state, answer.verdict
        if answer.verdict is RunHealth.HEALTHY:
            return before in (RunHealth.WARNING, RunHealth.FAILED)
        if not answer.is_trouble:
            return False
        last = float(answer.last_step or 0)
        onset = float(answer.onset_step or 0)
        known = [one for one in self._reported if (one.verdict, one.pattern) == (answer.verdict, str(answer.pattern))]
        new = all(onset > one.last for one in known)
        if new:
            self._reported.append(ReportedTrouble(answer.verdict, str(answer.pattern), last))
        return new


class FailureConfirmer:
    """Whether a failure is to be believed yet: enough losses came after it began, or no more come.

    A loss that jumped may come back, and a script that kills the run on our word cannot take that back; a NaN stays.
    """

    def __init__(self) -> None:
        self._seen: int | None = None
        """How many losses there were when the failure was first seen."""
        self._new = True

    def is_confirmed(self, answer: LogDiagnosis, *, quiet: bool, over: bool) -> bool:
        """`quiet`: no line has come for a moment; `over`: nor will one, as far as anybody can tell."""
        new, self._new = self._new, False
        if answer.verdict is not RunHealth.FAILED:
            self._seen = None
            return True
        if over or answer.curves is None:
            return True
        if answer.pattern is Pattern.NONE:  # an exception, after which the run may still have gone on
            return quiet
        steps = answer.curves.loss.steps
        since = len(steps) if self._seen is None else self._seen
        self._seen = since
        lasts = answer.pattern in PERMANENT
        if answer.onset_step is not None and (lasts or new):  # what was there before us need not be waited for
            since = min(since, int((steps <= answer.onset_step).sum()))
        wanted = MORE if lasts else max(LONGER, len(steps) // 20)
        return len(steps) - since >= wanted


QUIET_SECONDS = 2.0
"""Seconds after which a last line without an end is taken for whole."""
SILENT_SECONDS = 120.0
"""Seconds of silence after which no more is expected: what was only feared is said."""
MIN_INTERVAL, MAX_LOAD_FACTOR = 1.0, 12.0
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
            due = now + max(MIN_INTERVAL, MAX_LOAD_FACTOR * (clock() - started))
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
    if os.path.isdir(path) or _is_rewritten_whole(path):
        return RereadLog(path, judge)
    return GrowingLog(FileTail(path), path, _read, judge)


def _read(source: LogSource) -> list[LogTable]:
    """The tables in bytes at hand; JSON or CSV that turns out to be none is text."""
    kind = detect.detect_format(source.head)
    reader = next((one for one in detect.READERS if kind == one.FORMAT), console_log)
    found = reader.read(source)
    return found if isinstance(found, list) else [found]


def _is_rewritten_whole(path: str) -> bool:
    """Whether a file is of a format that is not written line by line: a JSON document, an event file, a checkpoint."""
    if not os.path.isfile(path) or not os.path.getsize(path):
        return False
    try:
        with LogSource.open(path) as source:
            kind = detect.detect_format(source.head)
            if kind not in LINE_FORMATS:
                return True
        return os.path.getsize(path) < MAX_REREAD_BYTES and all(
            one.format not in LINE_FORMATS for one in detect.read_file(path)
        )
    except UnreadableInput:
        return False

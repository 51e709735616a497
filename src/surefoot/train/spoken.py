"""Where a run's words go: the terminal or a file, its own and those of the log, and never the end of the run."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from typing import IO

from rich.console import Console as RichConsole
from rich.text import Text

from surefoot.records import EVENT_MARK


class Paper(RichConsole):
    """Prints words as they are; when nobody reads them any more, the training goes on without."""

    def __init__(self, file: IO[str] | None = None) -> None:
        super().__init__(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        if self.file is sys.stdout:  # else Python complains when it ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def say(self, words: str, style: str | None = None) -> None:
        """The style is that of the words alone; `print` would give it to a live line below them too."""
        self.print(Text(words, style or ""))

    def beat(self, step: int, label: str, words: str, style: str | None = None) -> None:
        """One line of a story; what is too long for the terminal goes on below its own beginning."""
        begin = f"step {step:<7} {label:9} "
        if self.is_terminal:
            words = textwrap.fill(words, max(40, self.width - len(begin) - 1), break_long_words=False)
        self.say(begin + words.replace("\n", "\n" + " " * len(begin)), style)


class Loud(logging.Handler):
    """Shows what surefoot logs among the other words; what is told as an event too is left to who tells events."""

    def __init__(self, paper: Paper, *, first: bool, rank: int = 0) -> None:
        super().__init__(logging.WARNING if first else logging.ERROR)
        self._paper = paper
        self._where = "" if first else f"rank {rank}: "
        self.addFilter(lambda record: not getattr(record, EVENT_MARK, False))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            words = self.format(record).removeprefix("surefoot: ")
            self._paper.print(f"{record.levelname.lower()}: {self._where}{words}")
        except Exception:
            self.handleError(record)

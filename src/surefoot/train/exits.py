"""How a run ends, in a number for whoever started it and in words for a person."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from surefoot.guard.signal_handlers import SIGNALS, ExitCodeKeeper
from surefoot.train.recipe.mistakes import RecipeError

DONE, FAILED, USAGE, RESTART, LEAVE = 0, 1, 2, 75, 76
_EXPLAINED = {
    DONE: "done",
    FAILED: "the run failed with an error of its own",
    USAGE: "bad usage: nothing was started, the message says what to change",
    RESTART: "restart me: told to end by a signal, or another process was lost; the same command goes on from the "
    "newest checkpoint",
    LEAVE: "do not restart me: surefoot stopped the run, and a restart would come to the same end",
}
_LOST = re.compile(
    r"gloo/|Connection (closed|reset) by peer|Socket (closed|Timeout)|Broken pipe|NCCL (error|operation|communicator)"
    r"|[Tt]imed out (waiting|after)|wait timeout after"
)
"""What torch says, in a plain RuntimeError, when another process does not answer."""
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_OUT_OF_MEMORY = (
    "There was not enough memory. Make batch.size smaller, and batch.accumulate larger by as much: the updates stay "
    "the same. Or set speed.checkpoint_activations=1, which computes again in backward what was kept; or "
    "protection.ring=false, which keeps no states to go back to."
)


class ToldToEnd(SystemExit):
    """A signal came; the run was saved first, if it had begun."""

    def __init__(self, number: int) -> None:
        super().__init__(RESTART)
        self.signal = signal.Signals(number).name

    def __str__(self) -> str:
        return f"{self.signal} came"


@contextmanager
def restartable() -> Iterator[None]:
    """In here, around `attach` too, SIGTERM, SIGINT, SIGUSR1 and SIGHUP end the run with 75, after it was saved.

    Before `attach` they end it at once. A signal that is ignored stays so, and one that comes again while the process
    ends does not change its exit code.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    mine = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    end = _End()
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, old in mine.items():
            if signal.getsignal(number) is end:
                signal.signal(number, old)
        if end.ending is not None:
            end.ending.install(mine)


class _End:
    """Ends the run at the first signal; another Ctrl-C, of a person who does not want to wait, is heard as well."""

    def __init__(self) -> None:
        self.ending: ExitCodeKeeper | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.ending is not None and number != signal.SIGINT:
            return
        self.ending = self.ending or ExitCodeKeeper(RESTART)
        raise ToldToEnd(number)


def code_for(error: BaseException, *, building: bool = False) -> int:
    """The number to end with after this error; while `building`, before the first update, a ValueError is bad usage."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else DONE if error.code is None else FAILED
    if isinstance(error, KeyboardInterrupt):
        return RESTART
    if _stopped(error):
        return LEAVE
    if out_of_memory(error):
        return FAILED
    if lost_another(error):
        return RESTART
    wrong = isinstance(error, ValueError | FileNotFoundError | PermissionError | ModuleNotFoundError)
    return USAGE if isinstance(error, RecipeError) or (building and wrong) else FAILED


def explain(code: int) -> str:
    """What a number that a run ended with means."""
    return _EXPLAINED.get(code, f"ended by signal {-code}" if code < 0 else "ended with a number that is none of ours")


def words_for(error: BaseException) -> str:
    """An error in words, with the way out where one is known."""
    said = str(error) or type(error).__name__
    if isinstance(error, ToldToEnd | KeyboardInterrupt):
        came = said if isinstance(error, ToldToEnd) else "The run was interrupted"
        return f"{came}. The same command goes on from the newest checkpoint."
    if _stopped(error):
        return f"{said} A restart would come to the same end: change what it names first."
    if out_of_memory(error):
        return f"{_OUT_OF_MEMORY} ({said.splitlines()[0]})"
    if lost_another(error):
        first = said.splitlines()[0]
        return (
            f"Another process is gone, or did not answer in time. The same command goes on from the newest "
            f"checkpoint. ({first})"
        )
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"


def out_of_memory(error: BaseException) -> bool:
    """On the accelerator or on the host."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def lost_another(error: BaseException) -> bool:
    """Whether the error, or what caused it, is that another process does not answer."""
    distributed = sys.modules.get("torch.distributed")
    kind = getattr(distributed, "DistError", None)
    cause: BaseException | None = error
    while cause is not None:
        if kind is not None and isinstance(cause, kind):
            return True
        if isinstance(cause, RuntimeError) and _LOST.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


def was_stopped(run_dir: Path) -> str | None:
    """Why surefoot stopped the run in this directory when it last ran; None when it did not.

    For a launcher that restarts whatever fails, as torchrun does: to be asked before `attach`.
    """
    from surefoot.journal.reader import read

    if not (run_dir / "events.jsonl").exists():
        return None
    events = read(run_dir).events
    began = max((at for at, event in enumerate(events) if event.get("name") == "attached"), default=0)
    for event in reversed(events[began:]):
        if event["kind"] == "decision" and event.get("action") == "stop" and event.get("applied"):
            return str(event.get("reason"))
    return None


def _stopped(error: BaseException) -> bool:
    from surefoot.actions.stop import TrainingStopped

    return isinstance(error, TrainingStopped)

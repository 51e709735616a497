"""Exit codes of a run, and error messages with the way out."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from surefoot.guard.out_of_memory import first_line, is_out_of_memory
from surefoot.guard.signal_handlers import SIGNALS, ExitCodeKeeper
from surefoot.records import Action
from surefoot.train.recipe.errors import RecipeError

DONE, FAILED, USAGE, RESTART, DO_NOT_RESTART = 0, 1, 2, 75, 76
_MEANINGS = {
    DONE: "done",
    FAILED: "the run failed with an error in its own code or data",
    USAGE: "bad usage: nothing was started, the message says what to change",
    RESTART: "restart me: ended by a signal, another rank was lost, or one of several ran out of memory; the same "
    "command continues from the newest checkpoint",
    DO_NOT_RESTART: "do not restart me: surefoot stopped the run, and a restart would end the same way",
}
_LOST_RANK = re.compile(
    r"gloo/|Connection (closed|reset) by peer|Socket (closed|Timeout)|Broken pipe|NCCL (error|operation|communicator)"
    r"|[Tt]imed out (waiting|after)|wait timeout after"
)
"""Messages of the plain RuntimeErrors torch raises when another rank does not answer."""
_OUT_OF_MEMORY = (
    "Out of memory. Lower batch.size and raise batch.accumulate by the same factor: the updates stay the same. Or set "
    "speed.checkpoint_activations=1, which recomputes activations in backward, or protection.snapshot_memory=false, "
    "which keeps no snapshots to rewind to."
)


class ReceivedSignal(SystemExit):
    """A signal ended the run; if training had begun, it was saved first."""

    def __init__(self, number: int) -> None:
        super().__init__(RESTART)
        self.signal = signal.Signals(number).name

    def __str__(self) -> str:
        return f"Received {self.signal}"


class OutOfMemoryRestart(SystemExit):
    """This rank ran out of memory where it cannot go on alone; a restart computes in smaller micro-batches."""

    def __init__(self, reason: str) -> None:
        super().__init__(RESTART)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}. Run the same command again to continue from the newest checkpoint."


@contextmanager
def restartable() -> Iterator[None]:
    """Inside, SIGTERM, SIGINT, SIGUSR1 and SIGHUP save the run and end it with exit code 75; enclose `attach` too.

    Before `attach` they end it at once. An ignored signal stays ignored, and a repeated signal does not change the
    exit code of a process that is already ending.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    replaced = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    handler = _EndOnSignal()
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in replaced.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, old)
        if handler.ending is not None:
            handler.ending.install(replaced)


class _EndOnSignal:
    """Ends the run at the first signal; a second Ctrl-C, from someone who does not want to wait, counts too."""

    def __init__(self) -> None:
        self.ending: ExitCodeKeeper | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.ending is not None and number != signal.SIGINT:
            return
        self.ending = self.ending or ExitCodeKeeper(RESTART)
        raise ReceivedSignal(number)


def code_for(error: BaseException, *, building: bool = False) -> int:
    """The exit code for this error; while `building`, before the first update, a ValueError counts as bad usage."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else DONE if error.code is None else FAILED
    if isinstance(error, KeyboardInterrupt):
        return RESTART
    if _is_stop(error):
        return DO_NOT_RESTART
    if is_out_of_memory(error):
        return FAILED
    if is_lost_rank(error):
        return RESTART
    bad_value = isinstance(error, ValueError | FileNotFoundError | PermissionError | ModuleNotFoundError)
    return USAGE if isinstance(error, RecipeError) or (building and bad_value) else FAILED


def explain(code: int) -> str:
    """What an exit code means."""
    return _MEANINGS.get(code, f"killed by signal {-code}" if code < 0 else "not an exit code of surefoot")


def message_for(error: BaseException) -> str:
    """The error as a message, with the way out where one is known."""
    message = str(error) or type(error).__name__
    if isinstance(error, ReceivedSignal | KeyboardInterrupt):
        reason = message if isinstance(error, ReceivedSignal) else "The run was interrupted"
        return f"{reason}. Run the same command again to continue from the newest checkpoint."
    if _is_stop(error):
        return f"{message} A restart would end the same way: fix the cause first."
    if is_out_of_memory(error):
        return f"{_OUT_OF_MEMORY} ({first_line(error)})"
    if is_lost_rank(error):
        return (
            "Another rank is gone, or did not answer in time. Run the same command again to continue from the newest "
            f"checkpoint. ({message.splitlines()[0]})"
        )
    return message if isinstance(error, ValueError) else f"{type(error).__name__}: {message}"


def is_lost_rank(error: BaseException) -> bool:
    """Whether the error, or one of its causes, is that another rank does not answer."""
    distributed = sys.modules.get("torch.distributed")
    dist_error = getattr(distributed, "DistError", None)
    cause: BaseException | None = error
    while cause is not None:
        if dist_error is not None and isinstance(cause, dist_error):
            return True
        if isinstance(cause, RuntimeError) and _LOST_RANK.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


def why_stopped(run_dir: Path) -> str | None:
    """Why surefoot stopped the last run in this directory; None if it did not.

    For launchers that restart whatever fails, as torchrun does: call it before `attach`.
    """
    from surefoot.journal.reader import read

    if not (run_dir / "events.jsonl").exists():
        return None
    events = read(run_dir).events
    start = max((index for index, event in enumerate(events) if event.get("name") == "attached"), default=0)
    for event in reversed(events[start:]):
        if event["kind"] == "decision" and event.get("action") == Action.STOP and event.get("applied"):
            return str(event.get("reason"))
    return None


def _is_stop(error: BaseException) -> bool:
    from surefoot.actions.stop import TrainingStopped

    return isinstance(error, TrainingStopped)

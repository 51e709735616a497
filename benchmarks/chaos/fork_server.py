"""Starts victims within a moment: a process that has loaded everything once and is forked for each of them.

What is forked is a process of its own, with its own session, that may be killed in any way. The nursery itself is told
what to do line by line on its input, and answers each line with one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from benchmarks.chaos.training_run import Plan, main
from surefoot.process_identity import end_with_parent

_SOON_NEEDED = (
    "surefoot.guard.checkpointer",
    "surefoot.guard.attach",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.onnx",
    "numpy.fft",
)


class Victim:
    """One process."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self._nursery, self.pid, self.log = nursery, pid, log

    @property
    def code(self) -> int | None:
        """How it ended; the negative number of the signal that killed it. None while it runs."""
        return self._nursery.codes().get(self.pid)

    def send(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Pull the plug."""
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 120.0) -> int:
        """How it ended; one that does not within this time is killed, and TimeoutError raised."""
        until = time.monotonic() + seconds
        while (code := self.code) is None:
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"a victim did not end within {seconds:.0f} s: {self.words()}")
            time.sleep(0.01)
        return code

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class Nursery:
    """The forking process, and what became of its children."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.chaos", "nursery", str(os.getpid())]
        env = os.environ | {"OMP_NUM_THREADS": "1", "SUREFOOT": "on"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, bufsize=1)
        self._codes: dict[int, int] = {}

    def start(self, plan: Plan, **env: str) -> Victim:
        log = Path(f"{plan.run}.log-{env.get('RANK', '0')}")
        pid = self._ask({"plan": asdict(plan), "log": str(log), "env": env})
        return Victim(self, int(pid), log)

    def team(self, plan: Plan, size: int) -> list[Victim]:
        """As many processes as one run has, or just one."""
        if size == 1:
            return [self.start(plan)]
        env = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        return [self.start(plan, RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in range(size)]

    def codes(self) -> dict[int, int]:
        self._codes |= {int(pid): int(code) for pid, code in self._ask({}).items()}
        return self._codes

    def _ask(self, told: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the nursery has ended with {self._process.wait()}")
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.stdout.close()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def serve() -> None:
    for module in _SOON_NEEDED:
        importlib.import_module(module)
    gc.freeze()  # what was loaded is shared by all, as long as nobody touches it
    live: set[int] = set()
    for line in sys.stdin:
        told = json.loads(line)
        if not told:
            print(json.dumps(_ended(live)), flush=True)
            continue
        nursery, pid = os.getpid(), os.fork()
        if pid == 0:
            end_with_parent(nursery)
            _live(told)
        live.add(pid)
        print(pid, flush=True)
    for pid in live:  # nobody is left to wait for these
        os.kill(pid, signal.SIGKILL)


def _ended(live: set[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pid in list(live):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            live.discard(pid)
            found[pid] = os.waitstatus_to_exitcode(status)
    return found


def _live(told: Mapping[str, Any]) -> NoReturn:
    """Train and end as a program does by itself, only without taking apart all that was loaded, which takes a while."""
    os.setsid()
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.environ.update(told["env"])
    code: Any = 1
    try:
        main(Plan(**told["plan"]))
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)

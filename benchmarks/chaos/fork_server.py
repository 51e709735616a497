"""Starts training processes fast: a server process imports everything once and forks for each of them.

Each fork has its own session and may be killed in any way. The server reads one JSON request per line on stdin and
answers each with one line.
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

from benchmarks.chaos.training_run import RunPlan, main
from benchmarks.checkout import worker_env
from surefoot.process_identity import end_with_parent

_PRELOADED = (
    "surefoot.guard.checkpointer",
    "surefoot.guard.attach",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.onnx",
    "numpy.fft",
)


class TrainingProcess:
    """One forked process."""

    def __init__(self, server: ForkServer, pid: int, log: Path) -> None:
        self._server, self.pid, self.log = server, pid, log

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for the signal that killed it; None while it runs."""
        return self._server.exit_codes().get(self.pid)

    def send(self, number: int) -> None:
        if self.exit_code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait for its end."""
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 120.0) -> int:
        """Wait for the exit code; kills the process and raises TimeoutError after this many seconds."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"a training process did not end within {seconds:.0f} s: {self.log_tail()}")
            time.sleep(0.01)
        return code

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class ForkServer:
    """A client of the forking process; knows the exit codes of its children."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.chaos", "fork-server", str(os.getpid())]
        env = worker_env(OMP_NUM_THREADS="1", SUREFOOT="on")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, bufsize=1)
        self._exit_codes: dict[int, int] = {}

    def start(self, plan: RunPlan, **env: str) -> TrainingProcess:
        log = Path(f"{plan.run}.log-{env.get('RANK', '0')}")
        pid = self._request({"plan": asdict(plan), "log": str(log), "env": env})
        return TrainingProcess(self, int(pid), log)

    def start_ranks(self, plan: RunPlan, size: int) -> list[TrainingProcess]:
        """Start all ranks of one run."""
        if size == 1:
            return [self.start(plan)]
        env = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        return [self.start(plan, RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in range(size)]

    def exit_codes(self) -> dict[int, int]:
        self._exit_codes |= {int(pid): int(code) for pid, code in self._request({}).items()}
        return self._exit_codes

    def _request(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError(f"the fork server exited with {self._process.wait()}")
        return json.loads(reply)

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
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def serve() -> None:
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # keeps the imported pages shared between the forks
    live: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            print(json.dumps(_reap(live)), flush=True)
            continue
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            end_with_parent(server)
            _run_child(request)
        live.add(pid)
        print(pid, flush=True)
    for pid in live:  # the client is gone
        os.kill(pid, signal.SIGKILL)


def _reap(live: set[int]) -> dict[int, int]:
    exit_codes: dict[int, int] = {}
    for pid in list(live):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            live.discard(pid)
            exit_codes[pid] = os.waitstatus_to_exitcode(status)
    return exit_codes


def _run_child(request: Mapping[str, Any]) -> NoReturn:
    """Train and exit as a program would, but without the interpreter's teardown, which is slow."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    devnull = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((devnull, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["env"])
    code: Any = 1
    try:
        main(RunPlan(**request["plan"]))
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

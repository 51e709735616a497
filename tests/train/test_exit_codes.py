from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from endless_run import main

import surefoot
from surefoot.checkpoint.store import CheckpointStore
from surefoot.guard.signal_handlers import SIGNALS
from surefoot.train import exit_codes
from surefoot.train.recipe.errors import RecipeError

SCRIPT = Path(__file__).with_name("endless_run.py")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers: after a stop signal, surefoot ignores further ones."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def is_saved(run: Path) -> bool:
    newest = CheckpointStore(run / "checkpoints").newest()
    return newest is not None and newest.step == surefoot.read(run).scalars["step"][-1] + 1 >= 20


def test_sigterm_saves_the_run_and_exits_with_the_restart_code(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "reached step 20\n"
        process.send_signal(signal.SIGTERM)
        last_line = process.stdout.read().splitlines()[-1]
    assert process.returncode == exit_codes.RESTART == 75
    assert last_line == "Received SIGTERM. Run the same command again to continue from the newest checkpoint."
    assert is_saved(tmp_path / "run")
    assert exit_codes.why_stopped(tmp_path / "run") is None


@pytest.mark.parametrize("number", SIGNALS)
def test_every_stop_signal_saves_the_run(number: int, tmp_path: Path) -> None:
    with pytest.raises(exit_codes.ReceivedSignal) as raised:
        main(tmp_path / "run", lambda _: os.kill(os.getpid(), number))
    assert raised.value.code == exit_codes.RESTART
    assert raised.value.signal == signal.Signals(number).name
    assert is_saved(tmp_path / "run")


def test_signal_before_attach_ends_the_process_at_once() -> None:
    with pytest.raises(exit_codes.ReceivedSignal) as raised, exit_codes.restartable():
        signal.raise_signal(signal.SIGTERM)
    assert (raised.value.code, raised.value.signal) == (75, "SIGTERM")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_are_restored_without_a_signal() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with exit_codes.restartable():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_repeated_signal_does_not_interrupt_the_shutdown() -> None:
    ended = []
    with pytest.raises(exit_codes.ReceivedSignal), exit_codes.restartable():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            ended.append("in the run")
    signal.raise_signal(signal.SIGTERM)
    ended.append("after it")
    assert ended == ["in the run", "after it"]


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with exit_codes.restartable():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_install_no_handlers() -> None:
    completed: list[bool] = []

    def run() -> None:
        with exit_codes.restartable():
            completed.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert completed == [True]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (surefoot.TrainingStopped("surefoot stopped the run: nan."), 76, "surefoot stopped the run: nan. A restart"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), 1, "Lower batch.size and raise batch.accumulate"),
        (MemoryError(), 1, "speed.checkpoint_activations=1"),
        (torch.distributed.DistNetworkError("no route"), 75, "Another rank is gone"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), 75, "in time"),
        (KeyboardInterrupt(), 75, "Run the same command again"),
        (RecipeError("a.yaml, line 3: lr: must be above 0"), 2, "a.yaml, line 3: lr: must be above 0"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
        (ValueError("shapes differ"), 1, "shapes differ"),
        (SystemExit(3), 3, "3"),
        (SystemExit(), 0, "SystemExit"),
        (SystemExit("bad news"), 1, "bad news"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_error_has_an_exit_code_and_a_message(error: BaseException, code: int, message: str) -> None:
    assert exit_codes.code_for(error) == code
    assert message in exit_codes.message_for(error)


def test_value_error_while_building_is_bad_usage() -> None:
    assert exit_codes.code_for(ValueError("there is no text in folder x"), building=True) == 2
    assert exit_codes.code_for(FileNotFoundError("x"), building=True) == 2
    assert exit_codes.code_for(ZeroDivisionError(), building=True) == 1


def test_host_out_of_memory_is_explained() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50)
    assert exit_codes.code_for(raised.value) == 1
    assert "batch.size" in exit_codes.message_for(raised.value)


def test_lost_rank_is_found_in_the_cause_of_an_error() -> None:
    lost = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 1800000ms for recv")
    error = RuntimeError("the last checkpoint could not be agreed on")
    error.__cause__ = lost
    assert exit_codes.code_for(error) == 75


@pytest.mark.parametrize(
    ("code", "message"), [(0, "done"), (75, "restart me"), (76, "do not restart"), (-9, "signal 9")]
)
def test_exit_codes_are_explained(code: int, message: str) -> None:
    assert message in exit_codes.explain(code)


def test_stopped_run_is_recognised_on_restart(tmp_path: Path) -> None:
    assert exit_codes.why_stopped(tmp_path) is None
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run(policy: surefoot.Policy, fault: float) -> None:
        with surefoot.attach(model, optimizer, run_dir=tmp_path, policy=policy) as guard:
            for step in range(60):
                guard.watch(model(torch.randn(8, 4) * (fault if step > 30 else 1)).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(surefoot.TrainingStopped):
        run(surefoot.Policy(max_consecutive_vetoes=1), torch.nan)
    assert "nan" in (exit_codes.why_stopped(tmp_path) or "")
    run(surefoot.Policy(), 1.0)
    assert exit_codes.why_stopped(tmp_path) is None

"""A training and the process that sends its alarms: real processes, a real server, real kills."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import descendants, run, started
from servers import AlarmServer, SilentServer, wait_for

import surefoot
from surefoot.alarms.alarm_process import start_alarms
from surefoot.alarms.alarm_target import alarm_targets
from surefoot.journal.writer import Journal, JournalLimits
from surefoot.records import Finding, FindingKind, Severity

SCRIPT = str(Path(__file__).with_name("alarmed_run.py"))
SECRET = "T0KEN"


def environment(url: str) -> dict[str, str]:
    return os.environ | {"SUREFOOT_ALARMS": f'[{{"to": "{url}", "levels": "all", "timeout": 5}}]'}


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("how", "last"), [("well", ("end", "the run has ended")), ("raises", ("crash", "RuntimeError: the loop broke"))]
)
def test_a_run_tells_what_it_found_and_how_it_ended(tmp_path: Path, how: str, last: tuple[str, str]) -> None:
    with AlarmServer() as server:
        done = run([sys.executable, SCRIPT, str(tmp_path / "run"), how], timeout=120, env=environment(server.url))
        assert (done.returncode == 0) == (how == "well"), done.stderr
        assert wait_for(lambda: len(server.received) >= 2)
    assert server.levels == ["finding", last[0]]
    assert "the loss is nan" in server.received[0]["title"]
    assert "cause: " in server.received[0]["text"]
    assert last[1] in server.received[1]["title"]
    assert server.received[0]["events"][0]["kind"] == "finding"
    assert SECRET not in done.stderr + done.stdout
    assert SECRET.encode() not in contents(tmp_path)


def test_kill_9_is_told_and_nothing_is_left_behind(tmp_path: Path) -> None:
    with AlarmServer() as server:
        command = [sys.executable, SCRIPT, str(tmp_path / "run"), "hangs"]
        with started(command, stdout=subprocess.PIPE, text=True, env=environment(server.url)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            (sender,) = descendants(process.pid)
            command_line = Path(f"/proc/{sender}/cmdline").read_bytes()
            assert b"sender_process" in command_line
            assert SECRET.encode() not in command_line + Path(f"/proc/{sender}/environ").read_bytes()
            assert b"libtorch" not in Path(f"/proc/{sender}/maps").read_bytes()
            os.kill(sender, signal.SIGTERM)  # it is meant for the training
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert wait_for(lambda: "crash" in server.levels)
        gone = server.received[-1]
        assert "the training process is gone, last step 3" in gone["title"]
        assert wait_for(lambda: not Path(f"/proc/{sender}").exists() or not command_of(sender))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_ten_thousand_findings_and_a_dead_server_do_not_hold_the_journal(tmp_path: Path) -> None:
    with SilentServer() as server:
        target = {"to": server.url, "timeout": 0.2, "per_hour": 10, "repeat_minutes": 0}
        journal = Journal(tmp_path / "run", info={}, on_failure=lambda reason: None)
        start_alarms(alarm_targets(target), journal)
        (companion,) = journal.companions
        for number in range(10_000):
            journal.event(
                Finding(
                    step=number,
                    attempt=number,
                    detector=FindingKind.JUMP,
                    severity=Severity.SEVERE,
                    detail=f"the loss jumped to {number}",
                )
            )
        journal.close()
        pid: int = companion.pid  # pyright: ignore[reportAttributeAccessIssue]
        assert command_of(pid), "closing waited for the process that sends"
        assert wait_for(lambda: not command_of(pid), 60)
        assert 1 <= len(server.connections) <= 10
    assert len(surefoot.read(tmp_path / "run").events) >= 10_000


def test_a_failing_receiver_is_in_the_journal_and_the_log_without_its_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with AlarmServer(403) as server, caplog.at_level(logging.WARNING, "surefoot"):
        journal = Journal(tmp_path / "run", info={}, on_failure=lambda reason: None)
        start_alarms(alarm_targets({"to": server.url, "levels": "all"}), journal)
        journal.event(Finding(step=1, attempt=1, detector=FindingKind.JUMP, detail="the loss jumped"))
        assert wait_for(lambda: "alarms do not reach http://127.0.0.1/***: HTTP 403" in caplog.text)
        journal.close()
    notes = [event["detail"] for event in surefoot.read(tmp_path / "run").events if event.get("name") == "alarms"]
    assert notes == ["alarms do not reach http://127.0.0.1/***: HTTP 403"]
    assert SECRET.encode() not in contents(tmp_path)


def test_a_healthy_run_is_the_same_with_alarms_and_records_no_secret(tmp_path: Path) -> None:
    def weights(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        guard = surefoot.attach(model, optimizer, **options) if options else None
        for _ in range(20):
            x = torch.randn(8, 4)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            (loss if guard is None else guard.watch(loss, x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if guard is not None:
            guard.close()
        return model.weight.detach()

    with AlarmServer() as server:
        info = {"recipe": {"text": f"alarms: {server.url}", "resolved": {"alarms": [server.url]}}}
        guarded = weights(run_dir=tmp_path, alarms=server.url, run_info=info)
    assert torch.equal(guarded, weights())
    recorded = surefoot.read(tmp_path).info
    assert recorded["config"]["alarms"] == recorded["recipe"]["resolved"]["alarms"] == ["http://127.0.0.1/***"]
    assert SECRET.encode() not in contents(tmp_path)


def test_bad_alarms_are_refused_before_anything_starts(
    attach: Callable[..., surefoot.Guard], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"attach: alarms: 'example\.com' is no address"):
        attach(model, optimizer, alarms="example.com")
    monkeypatch.setenv("SUREFOOT_ALARMS", "example.com")
    with pytest.raises(ValueError, match="attach: SUREFOOT_ALARMS in the environment: 'example"):
        attach(model, optimizer)
    assert not (tmp_path / "run").exists()
    attach(model, optimizer, alarms=False)


def test_a_journal_that_stops_is_told_because_its_events_are_not(tmp_path: Path) -> None:
    with AlarmServer() as server:
        limits = JournalLimits(heartbeat=0.1)
        journal = Journal(tmp_path / "run", info={}, on_failure=lambda reason: None, limits=limits)
        start_alarms(alarm_targets(server.url), journal)
        (tmp_path / "run" / "writer.lock").unlink()
        assert wait_for(lambda: len(server.received) == 1)
        journal.close()
    assert server.levels == ["severe"]
    assert "the journal has stopped, training goes on unrecorded: lost the run directory" in server.received[0]["title"]

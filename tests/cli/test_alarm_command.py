from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_processes import started
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.journal.writer import Journal

sys.path.insert(0, str(Path(__file__).parents[1] / "alarms"))
from servers import AlarmServer, wait_for


def alarms(*arguments: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["alarms", *arguments], env={"SUREFOOT_ALARMS": "", **environment})
    return result.exit_code, result.output


def test_a_test_alarm_says_whether_it_was_sent(tmp_path: Path) -> None:
    file = tmp_path / "address"
    with AlarmServer() as server:
        file.write_text(server.url + "\n")
        assert alarms("--test", "--to", f"@{file}") == (0, "sent to http://127.0.0.1/***\n")
        assert alarms("--test", SUREFOOT_ALARMS=server.url)[0] == 0
    assert [alarm["title"].rpartition(": ")[2] for alarm in server.received] == ["test alarm"] * 2
    assert alarms("--test", "--to", f"@{file}") == (1, "not sent to http://127.0.0.1/***: Connection refused\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--test"], "no receiver is named. Set SUREFOOT_ALARMS=https://..."),
        (["--to", "https://example.com"], "name the run directory to follow"),
        (["nowhere", "--to", "https://example.com"], "nowhere is not a directory"),
        ([".", "--to", "https://example.com"], "no process writes to .: its run has ended, or has not begun"),
        ([".", "--to", "https://example.com", "--levels", "x"], "levels='x' is not understood"),
        ([".", "--to", "@nowhere"], "--to @nowhere: the file cannot be read: No such file or directory"),
    ],
)
def test_bad_usage_is_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = alarms(*arguments)
    assert code == 2
    assert output.startswith(f"surefoot alarms: {message}")
    assert output.count("\n") == 1


def test_a_run_is_followed_until_its_writer_is_gone(tmp_path: Path) -> None:
    script = "import sys, time; from surefoot.journal.writer import Journal\n"
    script += "Journal(sys.argv[1], info={}, on_failure=print); print('ready', flush=True); time.sleep(600)"
    with AlarmServer() as server:
        with started([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            command = [sys.executable, "-m", "surefoot", "alarms", str(tmp_path)]
            environment = os.environ | {"SUREFOOT_ALARMS": server.url, "PYTHONUNBUFFERED": "1"}
            with started(command, stdout=subprocess.PIPE, text=True, env=environment) as watcher:
                assert watcher.stdout is not None
                assert watcher.stdout.readline().startswith(f"following {tmp_path}; alarms go to http://127.0.0.1/***")
                writer.kill()
                writer.wait()
                assert "crash    the training process is gone" in watcher.stdout.read()
                assert watcher.wait(60) == 1
        assert wait_for(lambda: server.levels == ["crash"])


def test_a_run_that_is_closed_ends_it_well(tmp_path: Path) -> None:
    from surefoot.alarms.watch_run import RunEnd, RunWatch
    from surefoot.records import Note

    journal = Journal(tmp_path, info={}, on_failure=lambda reason: None)
    watch = RunWatch(tmp_path)
    journal.event(Note(step=0, attempt=0, name="closed"))
    journal.close()
    watch.poll()
    assert watch.ended is RunEnd.CLOSED

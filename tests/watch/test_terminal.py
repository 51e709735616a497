"""`surefoot watch` in a real terminal, and its output for files and programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.watch.key_presses import press, split_keys
from surefoot.watch.screen import ScreenView

from .conftest import Training

pexpect = pytest.importorskip("pexpect")
MakeRun = Callable[..., Path]
Spawn = Callable[..., Any]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts surefoot watch in a terminal of 80 x 24."""
    children: list[Any] = []

    def start(*arguments: str, columns: int = 80, **environment: str) -> Any:
        command = ["-m", "surefoot", "watch", *arguments]
        env = os.environ | {"TERM": "xterm-256color", "LINES": "", "COLUMNS": ""} | environment
        env = {name: value for name, value in env.items() if value}
        child = pexpect.spawn(sys.executable, command, env=env, dimensions=(24, columns), encoding="utf-8", timeout=60)
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def end(child: Any) -> int:
    child.send("q")
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def test_a_real_run_is_followed_through_fault_rewind_kill_and_resume(spawn: Spawn, training: Training) -> None:
    training.start()
    child = spawn(str(training.run_dir))
    child.expect("HEALTHY")
    child.expect("gradient norm")
    child.send("g")
    child.expect(r"0\.weight")
    child.send("e")
    child.expect("the loss is nan")
    child.expect("rewound to step")
    training.kill()
    child.expect("KILLED")
    child.expect("its process ended without closing the run")
    training.start("resume")
    child.expect("running, at step")
    assert end(child) in (0, 1)


def test_keys_sizes_and_other_runs(spawn: Spawn, made_run: MakeRun, tmp_path: Path) -> None:
    made_run("first")
    made_run("second")
    child = spawn(str(tmp_path))
    child.expect("HEALTHY")
    for key, words in (("?", "scroll a list"), ("?", "loss"), ("l", r"scale \(log\)"), ("l", r"scale \(linear\)")):
        child.send(key)
        child.expect(words)
    child.send("r")
    child.expect("> shown .*second")
    child.send("\x1b[B")
    child.expect(r"> .*first")
    child.send("\r")
    child.expect(r"first: ended at step 300")
    child.setwinsize(10, 40)
    child.expect(r"q quit  \? help")
    assert end(child) == 0


def test_without_colour_nothing_is_coloured(spawn: Spawn, made_run: MakeRun) -> None:
    child = spawn(str(made_run()), NO_COLOR="1")
    child.expect("q quit")
    shown = child.before
    assert "HEALTHY" in shown
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38)[;m]", shown)
    assert end(child) == 0


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_output_that_is_no_terminal_gets_one_snapshot(made_run: MakeRun, encoding: str) -> None:
    path = made_run("run", loss={200: float("nan")})
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "watch", str(path)],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": "80"},
        check=False,
    )
    text = done.stdout.decode(encoding)
    assert done.returncode == 0, done.stderr
    assert "HEALTHY" in text.splitlines()[0]
    assert "NaN/Inf" in text
    assert "gradient flow by layer" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()[1:]) <= 80


def test_json_for_programs(made_run: MakeRun) -> None:
    result = CliRunner().invoke(app, ["watch", str(made_run("run", loss={299: float("inf")})), "--json"])
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert (answer["state"], answer["verdict"], answer["numbers"]["step"]) == ("ended", "healthy", 299)
    assert answer["numbers"]["loss"] is None


def test_a_run_that_died_gives_exit_code_1(made_run: MakeRun) -> None:
    path = made_run()
    from surefoot.process_identity import pid_scope

    (path / "writer.lock").write_text(json.dumps(pid_scope() | {"pid": 2**22 + 1, "start": 1}))
    result = CliRunner().invoke(app, ["watch", str(path), "--once"])
    assert result.exit_code == 1
    assert "KILLED" in result.stdout
    assert "is gone" in result.stdout


@pytest.mark.parametrize("arguments", [["nowhere"], [".", "--web", "--once"]])
def test_bad_usage_is_one_message(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["watch", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("surefoot watch: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_keys_are_told_apart() -> None:
    assert split_keys(b"q\x1b[A\x1b[6~\x1b\r") == ["q", "up", "page down", "escape", "enter"]
    view = ScreenView(panel="runs", selected=1)
    assert press("down", view, runs=2).view.selected == 1
    assert press("up", view, runs=2).view.selected == 0
    assert press("enter", view, runs=2).open_run
    assert press("up", ScreenView(panel="events"), runs=1).view.scroll == 1
    assert press("x", view, runs=2).view == view

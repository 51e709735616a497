"""`surefoot cases`: incidents of real runs, filtered, exported, read back; broken and hostile input does no harm."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from incident_run import CASE, case, train
from typer.testing import CliRunner

from surefoot.cases.case_library import load_cases, write_library
from surefoot.cases.case_record import CASE_SCHEMA
from surefoot.cli import app


def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["cases", *map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "deep" / "lr", fault="lr")
    train(folder / "nan", fault="nan")
    train(folder / "healthy", fault="")
    return folder


def test_one_row_for_each_incident_and_what_helped(runs: Path) -> None:
    code, text = command(runs)
    assert code == 0
    assert "2 incidents in 3 runs" in text
    assert "deep/lr, 12" in text
    assert "learning_rate x mlp/AdamW: 1 incident, 1 helped by" in text
    assert "bad_batch x mlp/AdamW: 1 incident, 1 helped by refuse (1)" in text
    found = json.loads(command(runs, "--json")[1])
    by_run = {found["run"]: found for found in found["cases"]}
    assert by_run["nan"]["actions"] == ["refuse"]
    assert "nonfinite" in by_run["nan"]["findings"]
    lr = by_run["deep/lr"]
    assert (lr["cause"], lr["helped"], lr["model"], lr["phase"]) == ("learning_rate", True, "Sequential", "early")
    assert "rewind" in lr["actions"]
    assert lr["loss_before"] < 1
    assert found["groups"][0]["incidents"] == 1


def test_filters(runs: Path) -> None:
    assert "1 incident in 3 runs" in command(runs, "--cause", "learning_rate")[1]
    assert "2 incidents in 3 runs" in command(runs, "--model", "MLP")[1]
    assert "0 incidents in 3 runs" in command(runs, "--model", "transformer")[1]
    code, text = command(runs, "--cause", "lr")
    assert code == 2
    assert "The causes are accumulation, " in text


def test_a_library_can_be_shared_and_read_in_place_of_runs(runs: Path, tmp_path: Path) -> None:
    library = tmp_path / "library.jsonl"
    assert command(runs, "--export", library)[0] == 0
    content = library.read_text()
    assert str(runs) not in content
    assert "incident_run.py" not in content
    assert os.uname().nodename not in content or len(os.uname().nodename) < 4
    assert json.loads(command(library, "--json")[1])["cases"] == json.loads(command(runs, "--json")[1])["cases"]
    with library.open("a") as file:
        file.write('{"schema": 1, "step"')  # torn
    assert "2 incidents" in command(library)[1]
    assert "note" not in command(library)[1]
    assert command(runs, "--export", library)[0] == 0  # a library is replaced, nothing else is
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    code, text = command(runs, "--export", other)
    assert code == 2
    assert "is no case library" in text
    assert other.read_text() == "mine"


def test_broken_and_foreign_folders_are_named_and_the_rest_is_listed(runs: Path, tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "executed"),))

    (tmp_path / "good").symlink_to(runs)  # links are not followed
    train(tmp_path / "fine", fault="nan")
    for name, content in (("foreign", b'{"accuracy": 1}'), ("torn", b'{"surefoot": '), ("list", b"[1, 2]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_bytes(content)
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "run.json").write_bytes(pickle.dumps(Planted()))
    (tmp_path / "planted" / "events.jsonl").write_bytes(pickle.dumps(Planted()))
    code, text = command(tmp_path)
    assert code == 0
    assert "1 incident in 5 runs" in text
    for name in ("foreign", "torn", "list", "planted"):
        assert f"note: {name} is left out: " in text
    assert not (tmp_path / "executed").exists()
    code, text = command(tmp_path / "missing")
    assert code == 2
    assert "does not exist" in text


def test_odd_events_do_not_stop_the_listing(tmp_path: Path) -> None:
    run = tmp_path / "odd"
    train(run, fault="nan", steps=150)
    events = (run / "events.jsonl").read_text().splitlines()
    odd: list[Any] = [None, 3, "x", [], {}, {"a": 1}, float("nan"), 10**40]
    added = []
    for kind in ("diagnosis", "decision", "trial", "outcome", "finding", "note"):
        for value in odd:
            names = ("cause", "evidence", "values", "action", "helped", "detector", "step", "confidence")
            added.append(json.dumps({"kind": kind, "attempt": 120} | dict.fromkeys(names, value)))
            added.append(json.dumps({"kind": value, "attempt": value}))
    (run / "events.jsonl").write_text("\n".join([*events, *added]) + "\n")
    code, text = command(tmp_path)
    assert code == 0
    assert "1 incident in 1 run" in text
    assert "left out" not in text


def test_hostile_text_cannot_steer_a_terminal(tmp_path: Path) -> None:
    library = tmp_path / "library.jsonl"
    evil = "\x1b]0;owned\x07\x1b[2J[red]x[/red]\u202e" + "y" * 10_000
    names = ("run", "cause", "model", "family", "optimizer", "module", "operation", "best")
    values = CASE.as_json() | dict.fromkeys(names, evil) | {"findings": [evil] * 500, "branches": {evil: 1.0}}
    lines = [values, values | {"step": "x"}, values | {"schema": 9}, {"schema": CASE_SCHEMA, "step": 3}]
    library.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[]\nnonsense\n")
    code, text = command(library)
    assert code == 0
    assert "2 incidents" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert len(text) < 60_000
    for number, words in ((2, "step is not a whole number"), (3, "schema '9'"), (5, "not a JSON object"), (6, "JSON")):
        assert f"line {number} is left out: " in text
        assert words in text
    (tmp_path / "other.txt").write_text("hello\n")
    code, text = command(tmp_path / "other.txt")
    assert code == 2
    assert "is no case library" in text


def test_a_library_keeps_every_field(tmp_path: Path) -> None:
    cases = [CASE, case(helped=None, loss_after=None, branches={}, banned=3, module="blocks.0", operation="softmax")]
    write_library(tmp_path / "library.jsonl", cases)
    assert load_cases(tmp_path / "library.jsonl").cases == cases

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from surefoot.cli import app
from surefoot.train.recipe import load, shipped


def asked(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["recipes", *map(str, arguments)])


def test_lists_what_is_shipped_one_line_each() -> None:
    result = asked()
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.stdout.splitlines()[: len(shipped())]]
    assert listed == ["lm-tiny", "lm-small", "lm-124m", "lm-1b"]
    assert "1 M parameters" in result.stdout.splitlines()[0]
    assert "surefoot recipes lm-tiny --to" in result.stdout
    assert [row["name"] for row in json.loads(asked("--json").stdout)] == listed


def test_copies_one_with_its_comments_and_never_over_another_file(tmp_path: Path) -> None:
    to = tmp_path / "mine.yaml"
    result = asked("lm-tiny", "--to", to)
    assert result.exit_code == 0
    assert f"surefoot train {to}" in result.stdout
    assert to.read_text() == shipped()["lm-tiny"].read_text() == asked("lm-tiny").stdout
    assert load(str(to)) == load("lm-tiny")
    to.write_text("mine")
    result = asked("lm-tiny", "--to", to)
    assert result.exit_code == 2
    assert "already exists" in result.stderr
    assert to.read_text() == "mine"


def test_a_folder_takes_the_copy_under_its_own_name(tmp_path: Path) -> None:
    assert asked("lm-small", "--to", tmp_path).exit_code == 0
    assert (tmp_path / "lm-small.yaml").exists()


def test_a_recipe_as_json_has_every_default_and_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(asked("lm-tiny", "--json").stdout)
    assert json.loads(path.read_text())["optimizer"]["betas"] == [0.9, 0.95]
    assert load(str(path)) == load("lm-tiny")


def test_explains_every_key() -> None:
    text = asked("--keys").stdout
    assert "  optimizer.lr: a number (above 0); default 0.0005\n      Peak learning rate." in text
    assert "  model: module:name" in text
    assert "required" in text
    rows = {row["key"]: row for row in json.loads(asked("--keys", "--json").stdout)}
    assert rows["schedule.name"]["default"] == "cosine"
    assert rows["model"]["required"]
    section = asked("batch", "--keys").stdout
    assert "batch.size" in section
    assert "optimizer.lr" not in section


def test_bad_usage_is_one_message_with_the_way_out(tmp_path: Path) -> None:
    for arguments, told in (
        (["lm-tinny"], "Did you mean lm-tiny?"),
        (["--to", "x.yaml"], "name the recipe to copy"),
        (["optimzer", "--keys"], "Did you mean optimizer?"),
        (["lm-tiny", "--to", tmp_path / "no" / "x.yaml"], "there is no folder"),
        (["--keys", "--to", "x.yaml"], "use >"),
    ):
        result = asked(*arguments)
        assert result.exit_code == 2
        assert told in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

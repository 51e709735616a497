from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from surefoot.cli import app
from surefoot.train.recipe import load, shipped


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["recipes", *map(str, arguments)])


def test_lists_shipped_recipes_one_line_each() -> None:
    result = invoke()
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.stdout.splitlines()[: len(shipped())]]
    assert listed == ["lm-tiny", "lm-small", "lm-124m", "lm-1b"]
    assert "1 M parameters" in result.stdout.splitlines()[0]
    assert "surefoot recipes lm-tiny --to" in result.stdout
    assert [row["name"] for row in json.loads(invoke("--json").stdout)] == listed


def test_copies_a_recipe_with_comments_and_never_overwrites(tmp_path: Path) -> None:
    to = tmp_path / "mine.yaml"
    result = invoke("lm-tiny", "--to", to)
    assert result.exit_code == 0
    assert f"surefoot train {to}" in result.stdout
    assert to.read_text() == shipped()["lm-tiny"].read_text() == invoke("lm-tiny").stdout
    assert load(str(to)) == load("lm-tiny")
    to.write_text("mine")
    result = invoke("lm-tiny", "--to", to)
    assert result.exit_code == 2
    assert "already exists" in result.stderr
    assert to.read_text() == "mine"


def test_copy_to_a_folder_keeps_the_name(tmp_path: Path) -> None:
    assert invoke("lm-small", "--to", tmp_path).exit_code == 0
    assert (tmp_path / "lm-small.yaml").exists()


def test_recipe_as_json_has_every_default_and_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(invoke("lm-tiny", "--json").stdout)
    assert json.loads(path.read_text())["optimizer"]["betas"] == [0.9, 0.95]
    assert load(str(path)) == load("lm-tiny")


def test_explains_every_key() -> None:
    text = invoke("--keys").stdout
    assert "  optimizer.lr: a number (above 0); default 0.0005\n      Peak learning rate." in text
    assert "  model: module:name" in text
    assert "required" in text
    rows = {row["key"]: row for row in json.loads(invoke("--keys", "--json").stdout)}
    assert rows["schedule.name"]["default"] == "cosine"
    assert rows["model"]["required"]
    section = invoke("batch", "--keys").stdout
    assert "batch.size" in section
    assert "optimizer.lr" not in section


def test_bad_usage_is_one_message_with_advice(tmp_path: Path) -> None:
    for arguments, message in (
        (["lm-tinny"], "Did you mean lm-tiny?"),
        (["--to", "x.yaml"], "name the recipe to copy"),
        (["optimzer", "--keys"], "Did you mean optimizer?"),
        (["lm-tiny", "--to", tmp_path / "no" / "x.yaml"], "there is no folder"),
        (["--keys", "--to", "x.yaml"], "use >"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

"""`surefoot plan` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from surefoot.cli import app
from surefoot.train.recipe import load


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def plan_json(*arguments: object) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_plans_seven_billion_parameters_from_options_alone() -> None:
    plan = plan_json("--params", "7e9", "--seq", 4096, "--gpus", "8x80GB", "--tokens", "1e12")
    assert plan["fits"]
    assert plan["model"]["parameters"]["value"] == pytest.approx(7e9, rel=0.03)
    steps, batch = plan["steps"]["total_steps"]["value"], plan["steps"]["effective_batch"]["value"]
    assert steps == pytest.approx(1e12 / (batch * 4096), rel=0.001)
    memory = {key: row["value"] for key, row in plan["memory"].items() if isinstance(row, dict)}
    assert memory["weights"] == 4 * plan["model"]["parameters"]["value"] // 8
    assert memory["total"] <= memory["capacity"] == 80e9


def test_page_fits_80_columns_and_every_number_says_where_it_comes_from() -> None:
    result = invoke("lm-tiny", "--gpus", "2x24GB", "--tokens", "1e9")
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "to spare" in result.stdout.splitlines()[0]
    plan = plan_json("lm-tiny", "--gpus", "2x24GB", "--tokens", "1e9", "data.kind=tokens", "data.path=nowhere.bin")
    sections = [section for key, section in plan.items() if isinstance(section, dict) and key != "recipe"]
    rows = [row for section in sections for row in section.values() if isinstance(row, dict)]
    assert len(rows) > 40
    assert all(row["how"] for row in rows)
    assert "nowhere.bin" in plan["steps"]["remarks"][0]


def test_says_what_would_help_when_it_does_not_fit() -> None:
    arguments = ("lm-1b", "--gpus", "2x16GB", "--tokens", "1e9", "data.context=1024")
    verdict = plan_json(*arguments)["verdict"]
    assert verdict.startswith("does not fit: ")
    assert "recompute saves" in verdict
    assert "zero3 saves" in verdict


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--params", "7e9", "--gpus", "8x"), "--gpus 8x: "),
        (("--params", "7e9", "--gpus", "8xGTX"), "GTX is neither a memory size"),
        (("--params", "-1"), "--params -1: expected a number above 0"),
        (("--params", "7e9", "--tokens", "many"), "--tokens many: "),
        (("--params", "7e9", "optimzer.lr=1"), "optimizer"),
        (("--params", "7e9", "--seq", 4096, "model.context=2048"), "4096 tokens, but the model reads 2048"),
        (("lm-tiny", "--seq", 512), "512 tokens, but the model reads 256"),
        (("lm-tiny", "--params", "7e9"), "leave out one of the two"),
        (("--params", "7e9", "optimizer.name=adamx"), "there is no optimizer 'adamx'"),
        ((), "--params"),
        (("no-such-recipe",), "no-such-recipe"),
        (("lm-tiny", "optimizer.lr=[1e-3, 3e-3]"), "sweeps a key"),
    ],
)
def test_bad_input_is_one_message(arguments: tuple[object, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


def test_counts_steps_of_a_recipe_as_its_loader_does(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(10_001))
    plan = plan_json(
        "lm-tiny",
        "data.kind=tokens",
        f"data.path={tmp_path / 'tokens.bin'}",
        "data.dtype=uint8",
        "data.held_out=0",
        "data.context=100",
        "batch.size=4",
        "batch.accumulate=3",
        "epochs=2",
        "--gpus",
        "2x24GB",
    )
    # 100 samples, 50 on each GPU, 12 full batches of 4, 4 updates of 3 batches
    assert plan["steps"]["steps_per_epoch"]["value"] == 4
    assert plan["steps"]["total_steps"]["value"] == 8
    assert plan["steps"]["effective_batch"]["value"] == 24


def test_path_begins_in_float32_and_ends_as_a_recipe_to_paste(tmp_path: Path) -> None:
    plan = plan_json("lm-small", "--gpus", "A100", "--tokens", "1e9", "data.kind=tokens", "data.path=nowhere.bin")
    path = plan["path"]
    steps = [path[key]["how"] for key in sorted(key for key in path if key.startswith("step_"))]
    assert "precision.compute=float32" in steps[0]
    assert [how.partition(":")[0] for how in steps[1:]] == [
        "precision.compute=tf32",
        "precision.compute=bfloat16",
        "batch.size=32 batch.accumulate=8",
        "speed.compile=true",
    ]
    assert path["step_0"]["value"] == path["step_1"]["value"]
    mine = tmp_path / "mine.yaml"
    mine.write_text("\n".join(["model: surefoot.models:decoder", "steps: 1", *path["lines"]]))
    recipe = load(str(mine))[0]
    assert (recipe.precision.compute, recipe.batch.size, recipe.speed.compile) == ("bfloat16", 32, True)

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surefoot.train.recipe import RecipeError, load


def names(*overrides: str, source: str = "lm-tiny") -> list[str]:
    return [recipe.name for recipe in load(source, overrides)]


def test_list_in_place_of_a_value_makes_one_run_each() -> None:
    recipes = load("lm-tiny", ["optimizer.lr=[1e-3, 3e-3]"])
    assert [recipe.optimizer.lr for recipe in recipes] == [1e-3, 3e-3]
    assert [recipe.name for recipe in recipes] == ["lm-tiny-lr=0.001", "lm-tiny-lr=0.003"]
    assert [recipe.run_dir for recipe in recipes] == ["runs/lm-tiny-lr=0.001", "runs/lm-tiny-lr=0.003"]


def test_several_lists_make_a_grid(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {factory: a:b, width: [64, 128]}\nsteps: 5\nspeed: {compile: [true, false]}\n")
    assert names("seed=[0, 1]", source=str(path)) == [
        f"mine-width={width}-compile={on}-seed={seed}"
        for width in (64, 128)
        for on in ("true", "false")
        for seed in (0, 1)
    ]


def test_ambiguous_keys_are_written_out_in_run_names() -> None:
    assert names("schedule.name=[cosine, linear]") == ["lm-tiny-schedule.name=cosine", "lm-tiny-schedule.name=linear"]


def test_lists_of_lists_sweep_where_a_list_is_expected() -> None:
    assert [r.optimizer.betas for r in load("lm-tiny", ["optimizer.betas=[0.8, 0.9]"])] == [(0.8, 0.9)]
    swept = load("lm-tiny", ["optimizer.betas=[[0.8, 0.9], [0.9, 0.99]]"])
    assert [r.optimizer.betas for r in swept] == [(0.8, 0.9), (0.9, 0.99)]
    (recipe,) = load("lm-tiny", ["model.sizes=[[1, 2]]"])
    assert recipe.model.arguments["sizes"] == [1, 2]


def test_custom_run_dirs_are_made_unique() -> None:
    folders = [recipe.run_dir for recipe in load("lm-tiny", ["run_dir=/data/x/", "seed=[1, 2]"])]
    assert folders == ["/data/x-seed=1", "/data/x-seed=2"]
    folders = [recipe.run_dir for recipe in load("lm-tiny", ["run_dir=x", "name=[a, b]"])]
    assert folders == ["x", "x-2"]


def test_folder_names_are_safe_and_unique() -> None:
    unsafe_values = ["a/b", "a b", "A?B", "../..", "x" * 500, "x" * 501, "é", "con:1"]
    recipes = load("lm-tiny", [f"sample.prompt={unsafe_values!r}"])
    folders = [str(recipe.run_dir) for recipe in recipes]
    assert len({folder.lower() for folder in folders}) == len(unsafe_values)
    for folder in folders:
        assert re.fullmatch(r"runs/[A-Za-z0-9_.=+-]{1,130}", folder)
        assert ".." not in folder
    assert folders == [recipe.run_dir for recipe in load("lm-tiny", [f"sample.prompt={unsafe_values!r}"])], (
        "the same each time"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lr=[]"], "an empty list"),
        (["optimizer.lr=[1e-3, 0.001]"], "occurs twice"),
        (["optimizer.lr=[1e-3, fast]"], "lm-tiny-lr=fast), command line, optimizer.lr=[1e-3, fast]: expected a number"),
        (["optimizer=[{lr: 1}, {lr: 2}]"], "expected keys and values"),
        ([f"seed={list(range(50))}", f"model.width={list(range(50))}"], "2500 runs, of 1000 at most"),
    ],
)
def test_invalid_sweeps_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        load("lm-tiny", overrides)

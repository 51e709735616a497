from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.train.recipe import Recipe, load


def load_one(*overrides: str, source: str = "lm-tiny") -> Recipe:
    (recipe,) = load(source, overrides)
    return recipe


def test_override_replaces_the_value_in_the_file() -> None:
    recipe = load_one("optimizer.lr=3e-4", "speed.compile=true", "protection.clip=null", "seed=1", "seed=2")
    assert (recipe.optimizer.lr, recipe.speed.compile, recipe.protection.clip) == (3e-4, True, None)
    assert recipe.seed == 2, "the last override counts"
    assert recipe.optimizer.weight_decay == 0.1, "the rest of the section is unchanged"


@pytest.mark.parametrize(
    ("value", "path"),
    [("[a.txt,b.txt]", ["a.txt", "b.txt"]), ("a.txt", ["a.txt"]), ("['a, b.txt']", ["a, b.txt"])],
)
def test_list_is_a_value_where_a_list_is_expected(value: str, path: list[str]) -> None:
    assert load_one("data.kind=text", f"data.path={value}").data.path == path


@pytest.mark.parametrize(
    "text", ["def main():", "# hello", "a: b", "x = 3 # y", "- a", "*all", "&x", "!a", "%d", "@me"]
)
def test_text_needs_no_quotes(text: str) -> None:
    assert load_one(f"sample.prompt={text}").sample.prompt == text


def test_quoted_numbers_are_text() -> None:
    assert load_one("sample.prompt='1e-4'").sample.prompt == "1e-4"
    assert load_one('sample.prompt=""').sample.prompt == ""
    assert load_one("name=7").name == "7", "a name is text without quotes"


def test_epochs_replace_steps() -> None:
    recipe = load_one("epochs=2")
    assert (recipe.steps, recipe.epochs) == (None, 2)
    assert load_one("epochs=null").steps == 600


def test_arguments_are_added_to_a_factory_given_as_a_string(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: mine:make\nsteps: 1\n")
    recipe = load_one("model.width=3", "model.deep.er=x", source=str(path))
    assert (recipe.model.factory, recipe.model.arguments) == ("mine:make", {"width": 3, "deep": {"er": "x"}})
    assert load_one("model=other:make").model.arguments == {}, "a new factory has its own arguments"

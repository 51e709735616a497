from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.train.recipe import Recipe, load


def only(*overrides: str, source: str = "lm-tiny") -> Recipe:
    (recipe,) = load(source, overrides)
    return recipe


def test_a_key_on_the_command_line_counts_more_than_the_file() -> None:
    recipe = only("optimizer.lr=3e-4", "speed.compile=true", "protection.clip=null", "seed=1", "seed=2")
    assert (recipe.optimizer.lr, recipe.speed.compile, recipe.protection.clip) == (3e-4, True, None)
    assert recipe.seed == 2, "the last word counts"
    assert recipe.optimizer.weight_decay == 0.1, "the rest of the section stays"


@pytest.mark.parametrize(
    ("said", "path"),
    [("[a.txt,b.txt]", ["a.txt", "b.txt"]), ("a.txt", ["a.txt"]), ("['a, b.txt']", ["a, b.txt"])],
)
def test_a_list_stays_a_list_where_one_belongs(said: str, path: list[str]) -> None:
    assert only("data.kind=text", f"data.path={said}").data.path == path


@pytest.mark.parametrize(
    "text", ["def main():", "# hello", "a: b", "x = 3 # y", "- a", "*all", "&x", "!a", "%d", "@me"]
)
def test_text_needs_no_quotes_whatever_yaml_makes_of_it(text: str) -> None:
    assert only(f"sample.prompt={text}").sample.prompt == text


def test_quotes_make_text_of_what_would_be_a_number() -> None:
    assert only("sample.prompt='1e-4'").sample.prompt == "1e-4"
    assert only('sample.prompt=""').sample.prompt == ""
    assert only("name=7").name == "7", "a name is text without them"


def test_epochs_take_the_place_of_the_steps_in_the_file() -> None:
    recipe = only("epochs=2")
    assert (recipe.steps, recipe.epochs) == (None, 2)
    assert only("epochs=null").steps == 600


def test_arguments_are_added_to_a_factory_that_was_written_short(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: mine:make\nsteps: 1\n")
    recipe = only("model.width=3", "model.deep.er=x", source=str(path))
    assert (recipe.model.factory, recipe.model.arguments) == ("mine:make", {"width": 3, "deep": {"er": "x"}})
    assert only("model=other:make").model.arguments == {}, "a new factory brings arguments of its own"

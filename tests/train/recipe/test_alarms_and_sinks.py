"""`alarms` and `log.sinks` of a recipe: lists that are no sweep, checked when the recipe is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.train.recipe import RecipeError, load
from surefoot.train.recipe.validate_recipe import remarks

HOOK = "https://example.com/hooks/s3cret-token"


def recipe_file(folder: Path, text: str) -> str:
    file = folder / "mine.yaml"
    file.write_text(f"model: surefoot.models:decoder\nsteps: 3\n{text}\n")
    return str(file)


def test_one_address_or_a_list_of_receivers_is_one_run(tmp_path: Path) -> None:
    (recipe,) = load(recipe_file(tmp_path, f"alarms: {HOOK}"), ())
    assert recipe.alarms == [HOOK]
    text = f"alarms:\n  - {HOOK}\n  - {{command: [./page.sh, --now], levels: [crash]}}"
    (recipe,) = load(recipe_file(tmp_path, text), ())
    assert recipe.alarms == [HOOK, {"command": ["./page.sh", "--now"], "levels": ["crash"]}]
    (recipe,) = load(recipe_file(tmp_path, "log:\n  sinks: [tensorboard, {to: tensorboard, layers: true}]"), ())
    assert recipe.log.sinks == ["tensorboard", {"to": "tensorboard", "layers": True}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alarms: example", "line 3: alarms: 'example' is no address"),
        (f"alarms: {{to: '{HOOK}', level: 1}}", "line 3: alarms: there is no option 'level'"),
        ("log: {sinks: tensorbord}", "log.sinks: there is no sink 'tensorbord'. Did you mean tensorboard?"),
    ],
)
def test_bad_values_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load(recipe_file(tmp_path, text), ())
    assert message in str(error.value)
    assert "s3cret" not in str(error.value)


def test_an_address_on_the_command_line_is_not_repeated_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="command line, alarms: ") as error:
        load(recipe_file(tmp_path, ""), [f"alarms={{to: '{HOOK}', level: 1}}"])
    assert "s3cret" not in str(error.value)


def test_without_protection_it_is_said_that_nothing_is_sent(tmp_path: Path) -> None:
    (recipe,) = load(recipe_file(tmp_path, f"alarms: {HOOK}\nprotection: {{mode: 'off'}}"), ())
    assert any("no alarms are sent" in text for text in remarks(recipe))

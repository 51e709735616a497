"""Any recipe file and any command line give a recipe or one message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from surefoot.train.recipe import RecipeError, as_plain, differences, load
from surefoot.train.recipe.keys import keys, sections

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["a:b", "cosine"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [*(key.name for key in keys().values()), *sections(), "model.width", "loss.x.y", "optimizer.lrr"]
)
MINIMAL = {"model": "a:b", "steps": 5}


def check_load(source: Path, overrides: list[str]) -> None:
    """Load it: either recipes that can be recorded, or an error of a few lines."""
    message, recipes = "", []
    try:
        recipes = load(str(source), overrides)
    except RecipeError as error:
        message = str(error)
    assert bool(message) != bool(recipes)
    assert len(message.splitlines()) <= 7
    assert len({str(recipe.run_dir).lower() for recipe in recipes}) == len(recipes)
    for recipe in recipes:
        assert re.fullmatch(r"[^\x00]+", str(recipe.run_dir))
        assert differences(json.loads(json.dumps(as_plain(recipe))), recipe) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    recipe: dict[str, Any] = dict(MINIMAL)
    for name, value in flat.items():
        *above, last = name.split(".")
        inner = recipe
        for name_part in above:
            if not isinstance(inner.get(name_part), dict):
                inner[name_part] = {}
            inner = inner[name_part]
        inner[last] = value
    return recipe


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.booleans())
def test_any_values_in_a_file(folder: Path, flat: dict[str, Any], as_json: bool) -> None:
    path = folder / ("mine.json" if as_json else "mine.yaml")
    path.write_text(json.dumps(nested(flat)) if as_json else yaml.safe_dump(nested(flat), allow_unicode=True), "utf-8")
    check_load(path, [])


@given(st.lists(st.tuples(NAMES, VALUES.map(json.dumps) | st.text(max_size=12)).map("=".join) | st.text(), max_size=3))
def test_any_overrides_on_the_command_line(folder: Path, overrides: list[str]) -> None:
    path = folder / "fine.json"
    path.write_text(json.dumps(MINIMAL))
    check_load(path, overrides)


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_in_a_file(folder: Path, raw: bytes) -> None:
    path = folder / "bytes.yaml"
    path.write_bytes(raw)
    check_load(path, [])

"""Whatever stands in a recipe or on the command line, the answer is a recipe or one message."""

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
FOUND = {"model": "a:b", "steps": 5}


def tried(source: Path, overrides: list[str]) -> None:
    """Load it; what comes of it can be recorded, and is told in few lines otherwise."""
    told, recipes = "", []
    try:
        recipes = load(str(source), overrides)
    except RecipeError as wrong:
        told = str(wrong)
    assert bool(told) != bool(recipes)
    assert len(told.splitlines()) <= 7
    assert len({str(recipe.run_dir).lower() for recipe in recipes}) == len(recipes)
    for recipe in recipes:
        assert re.fullmatch(r"[^\x00]+", str(recipe.run_dir))
        assert differences(json.loads(json.dumps(as_plain(recipe))), recipe) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = dict(FOUND)
    for name, value in flat.items():
        *above, last = name.split(".")
        inner = made
        for each in above:
            if not isinstance(inner.get(each), dict):
                inner[each] = {}
            inner = inner[each]
        inner[last] = value
    return made


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.booleans())
def test_any_values_in_a_file(folder: Path, flat: dict[str, Any], as_json: bool) -> None:
    path = folder / ("mine.json" if as_json else "mine.yaml")
    path.write_text(json.dumps(nested(flat)) if as_json else yaml.safe_dump(nested(flat), allow_unicode=True), "utf-8")
    tried(path, [])


@given(st.lists(st.tuples(NAMES, VALUES.map(json.dumps) | st.text(max_size=12)).map("=".join) | st.text(), max_size=3))
def test_any_words_on_the_command_line(folder: Path, overrides: list[str]) -> None:
    path = folder / "fine.json"
    path.write_text(json.dumps(FOUND))
    tried(path, overrides)


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_for_a_file(folder: Path, raw: bytes) -> None:
    path = folder / "bytes.yaml"
    path.write_bytes(raw)
    tried(path, [])

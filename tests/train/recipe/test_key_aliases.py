"""Recipes and overrides with the keys of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot.train.recipe import RecipeError, as_plain, differences, load
from surefoot.train.recipe.key_aliases import RECIPE

MODEL = {"model": "mine:make", "steps": 10, "name": "same"}
OLD: dict[str, Any] = {
    "protection": {"policy": "observe", "ring": "8GB", "figures": {"limit": 5, "warmup": 9}},
    "precision": {"compute": "float16", "first_scale": 1024.0, "grow_every": 100},
    "parallel": {"how": "zero1"},
    "schedule": {"floor": 0.2},
    "checkpoints": {"careful": True},
}
NEW: dict[str, Any] = {
    "protection": {"mode": "observe", "snapshot_memory": "8GB", "policy": {"limit": 5, "warmup": 9}},
    "precision": {"compute": "float16", "init_scale": 1024.0, "growth_interval": 100},
    "parallel": {"strategy": "zero1"},
    "schedule": {"min_lr_ratio": 0.2},
    "checkpoints": {"cautious_after_crash": True},
}


def write_recipe(folder: Path, recipe: dict[str, Any]) -> str:
    path = folder / f"{len(list(folder.iterdir()))}.yaml"
    path.write_text(yaml.safe_dump(MODEL | recipe))
    return str(path)


def as_overrides(recipe: dict[str, Any]) -> list[str]:
    return [
        f"{section}.{key}={json.dumps(value) if not isinstance(value, str) else value}"
        for section, values in recipe.items()
        for key, value in values.items()
    ]


def test_every_renamed_key_is_covered() -> None:
    old = {f"{section}.{key}" for section, values in OLD.items() for key in values}
    assert old >= {*RECIPE, "protection.policy"}


def test_old_keys_load_to_the_same_recipe(tmp_path: Path) -> None:
    (new,) = load(write_recipe(tmp_path, NEW))
    assert load(write_recipe(tmp_path, OLD)) == [new]
    assert load(write_recipe(tmp_path, {}), as_overrides(OLD)) == [new]
    assert load(write_recipe(tmp_path, {}), as_overrides(NEW)) == [new]
    assert load(write_recipe(tmp_path, NEW), as_overrides(OLD)) == [new]
    assert (
        load(write_recipe(tmp_path, {}), [f"protection={json.dumps(OLD['protection'])}"])[0].protection
        == new.protection
    )


def test_policy_is_a_mode_or_a_mapping(tmp_path: Path) -> None:
    source = write_recipe(tmp_path, {})
    assert load(source, ["protection.policy=off"])[0].protection.mode == "off"
    assert load(source, ["protection.policy={limit: 5}"])[0].protection.policy == {"limit": 5}
    (recipe,) = load(source, ["protection.policy=observe", "protection.policy.limit=5"])
    assert (recipe.protection.mode, recipe.protection.policy) == ("observe", {"limit": 5})
    modes = [recipe.protection.mode for recipe in load(source, ["protection.policy=[protect, off]"])]
    assert modes == ["protect", "off"]


def test_errors_name_the_line_of_the_old_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: a:b\nsteps: 1\nschedule:\n  floor: high\n")
    with pytest.raises(RecipeError, match=r"line 4: schedule\.min_lr_ratio: expected a number"):
        load(str(path))


def test_old_key_together_with_its_new_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"schedule\.floor: there is no such key\. Did you mean schedule\.min_lr"):
        load(write_recipe(tmp_path, {"schedule": {"floor": 0.1, "min_lr_ratio": 0.2}}))


def test_run_recorded_with_old_keys_can_be_resumed(tmp_path: Path) -> None:
    (recipe,) = load(write_recipe(tmp_path, NEW))
    assert differences(as_plain(recipe) | OLD | {"optimizer": as_plain(recipe)["optimizer"]}, recipe) == []

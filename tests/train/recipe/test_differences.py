from __future__ import annotations

import json
from pathlib import Path

from surefoot.train.recipe import as_plain, differences, load, shipped


def test_recorded_recipe_can_be_loaded(tmp_path: Path) -> None:
    for name in shipped():
        (recipe,) = load(name)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(as_plain(recipe)))
        assert load(str(path)) == [recipe]


def test_differences_list_every_changed_key() -> None:
    old = json.loads(json.dumps(as_plain(load("lm-tiny", ["model.dropout=0.1"])[0])))
    assert differences(old, load("lm-tiny", ["model.dropout=0.1"])[0]) == []
    new = load(
        "lm-tiny", ["optimizer.lr=1e-3", "protection.policy.max_consecutive_vetoes=5", "optimizer.betas=[0.9, 0.99]"]
    )[0]
    assert sorted(differences(old, new)) == [
        ("model.dropout", 0.1, None),
        ("optimizer.betas", [0.9, 0.95], [0.9, 0.99]),
        ("optimizer.lr", 0.003, 0.001),
        ("protection.policy.max_consecutive_vetoes", None, 5),
    ]


def test_new_key_with_its_default_is_no_difference() -> None:
    (recipe,) = load("lm-tiny", ["evaluation.batches=20"])
    old = as_plain(recipe)
    del old["parallel"], old["evaluation"]["batches"], old["loss"], old["data"]["path"]
    assert differences(old, recipe) == []
    assert differences(old, load("lm-tiny", ["parallel.strategy=zero1", "evaluation.batches=20"])[0]) == [
        ("parallel.strategy", "data", "zero1")
    ]

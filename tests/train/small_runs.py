"""Small recipes that train in seconds, and their results."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

TEXTS, HELD_OUT = 26, 6
"""With 8 samples per update the last update has 2; lengths differ, so batches have different numbers of targets."""
RECIPE: dict[str, Any] = {
    "name": "small",
    "device": "cpu",
    "steps": 12,
    "model": {"factory": "surefoot.models:decoder", "vocab": 256, "width": 16, "layers": 1, "heads": 2, "context": 24},
    "data": {"kind": "text", "context": 24, "packing": False},
    "batch": {"size": 8},
    "optimizer": {"lr": 3e-3},
    "speed": {"threads": 1},
    "checkpoints": {"every": 4},
    "evaluation": {"every": 5},
    "log": {"every": 4},
}


def small_recipe(folder: Path, **sections: Any) -> str:
    """Write a recipe file with these sections changed, and return its path."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("texts", TEXTS), ("held_out", HELD_OUT)):
        texts = ["".join(rng.choices("abcde ", k=rng.randint(4, 24))) for _ in range(count)]
        _write(folder / f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = RECIPE | {"run_dir": str(folder / "run")}
    if sections.get("data", {}).get("kind") != "own":
        paths = {"path": [str(folder / "texts.jsonl")], "held_out_path": [str(folder / "held_out.jsonl")]}
        recipe["data"] = recipe["data"] | paths
    for name, section in sections.items():
        merged = isinstance(section, dict) and name not in ("model", "loss") and section.get("kind") != "own"
        recipe[name] = {**recipe.get(name, {}), **section} if merged else section
    _write(folder / "recipe.yaml", yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}))
    return str(folder / "recipe.yaml")


def _write(path: Path, text: str) -> None:
    """Write atomically: another rank may be reading the same file."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def newest_tensors(run_dir: str | Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint of a run: weights and moments."""
    newest = max(Path(run_dir).glob("checkpoints/step-*/manifest.json")).parent
    files = sorted(newest.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(bool((some[name] == others[name]).all()) for name in some)

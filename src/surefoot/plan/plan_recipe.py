"""The recipe of a plan from options alone: a decoder of about so many parameters, and usual settings for its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surefoot.plan.plan_error import PlanError
from surefoot.train.recipe import Recipe, load
from surefoot.train.recipe.errors import RecipeOrigin
from surefoot.train.recipe.load_recipe import override
from surefoot.train.recipe.validate_recipe import validate

_SMALL = 50e6
"""Below this many parameters, a large vocabulary would be most of the model: bytes are the tokens."""
_GPT3 = (
    (2.5e8, 0.5e6, 6.0e-4),
    (5.5e8, 0.5e6, 3.0e-4),
    (1.0e9, 0.5e6, 2.5e-4),
    (2.0e9, 1.0e6, 2.0e-4),
    (4.5e9, 1.0e6, 1.6e-4),
    (1.0e10, 2.0e6, 1.2e-4),
    (5.0e10, 2.0e6, 1.0e-4),
    (math.inf, 3.2e6, 0.6e-4),
)
"""Up to so many parameters: tokens per update and peak lr of the GPT-3 models (Brown et al. 2020, table 2.1)."""
GPT3 = "GPT-3 of this size (Brown et al. 2020, table 2.1)"


def usual_settings(parameters: float) -> tuple[float, float]:
    """Tokens per update and peak lr for a language model of this size."""
    return next((tokens, lr) for limit, tokens, lr in _GPT3 if parameters <= limit)


def decoder_shape(parameters: float) -> dict[str, int]:
    """Vocabulary, width, layers and heads of a decoder with about this many parameters, as deep as is usual."""
    vocab = 256 if parameters < _SMALL else 50304
    aspect = 64 if parameters < 3e8 else 85 if parameters < 2e9 else 128
    best: tuple[float, dict[str, int]] | None = None
    for width in [*range(32, 1024, 32), *range(1024, 2048, 256), *range(2048, 32769, 512)]:
        layers = round((parameters - vocab * width) / (12 * width**2))
        if layers < 1:
            break
        if width >= 256 and width % 64:
            continue
        count = 12 * width**2 * layers + vocab * width
        cost = abs(math.log(width / layers / aspect)) + 10 * abs(math.log(count / parameters))
        if best is None or cost < best[0]:
            heads = width // 128 if width >= 1024 else max(1, width // 64)
            best = cost, {"vocab": vocab, "width": width, "layers": layers, "heads": heads}
    if best is None:
        raise PlanError(f"--params {parameters:g}: expected at least 0.1 M parameters, such as 7e9 or 7B")
    return best[1]


def recipe_from_options(
    parameters: float, seq: int, overrides: Sequence[str], settings: dict[str, Any] | None = None
) -> Recipe:
    """A decoder on token files with these many parameters; overrides are those of a recipe."""
    _, lr = usual_settings(parameters)
    plain: dict[str, Any] = {
        "name": f"plan-{parameters:.3g}".replace("+", ""),
        "device": "cuda",
        "steps": 1000,
        "model": {"factory": "surefoot.models:decoder", **decoder_shape(parameters), "context": seq},
        "data": {"kind": "tokens", "path": ["train-*.bin"], "context": seq},
        "batch": {"size": 1, "accumulate": 1},
        "optimizer": {"name": "adamw", "lr": lr, "weight_decay": 0.1},
        "precision": {"compute": "bfloat16"},
        "protection": {"clip": 1.0},
    }
    for name, value in (settings or {}).items():
        section, _, key = name.partition(".")
        plain[section] = value if not key else plain.get(section, {}) | {key: value}
    plain, origin = override(plain, overrides, RecipeOrigin("options"))
    return validate(plain, origin)


def recipe_from_file(source: str, overrides: Sequence[str]) -> Recipe:
    """The recipe of a file or shipped name; one of a sweep cannot be chosen here."""
    recipes = load(source, overrides)
    if len(recipes) > 1:
        raise PlanError(f"{source} sweeps a key over {len(recipes)} values; set the key to one value to plan that run")
    return recipes[0]


def replaced(recipe: Recipe, **settings: Any) -> Recipe:
    """The recipe with other values, such as batch_size=8 or parallel_strategy="zero3"."""
    updates: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.partition("_")
        updates.setdefault(section, {})[key] = value
    sections = {name: getattr(recipe, name).model_copy(update=values) for name, values in updates.items()}
    return recipe.model_copy(update=sections)

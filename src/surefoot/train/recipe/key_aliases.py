"""Recipe keys that were renamed: recipes and overrides with the old keys are still read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.train.recipe.errors import KeyPath

RECIPE = {
    "protection.figures": "protection.policy",
    "protection.ring": "protection.snapshot_memory",
    "precision.first_scale": "precision.init_scale",
    "precision.grow_every": "precision.growth_interval",
    "parallel.how": "parallel.strategy",
    "schedule.floor": "schedule.min_lr_ratio",
    "checkpoints.careful": "checkpoints.cautious_after_crash",
}
"""Old key to new key. `protection.policy` changed its meaning: see `_is_old_mode`."""
_OLD_MODE, _MODE = ("protection", "policy"), ("protection", "mode")
_RENAMED = {tuple(old.split(".")): tuple(new.split(".")) for old, new in RECIPE.items()}


def renamed_path(path: KeyPath, value: Any) -> KeyPath:
    """The path of today for a key that is set to `value`; keys below a renamed key move with it."""
    if path == _OLD_MODE and _is_old_mode(value):
        return _MODE
    new = _RENAMED.get(path[:2])
    return path if new is None else (*new, *path[2:])


def upgrade(plain: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, KeyPath]]:
    """The recipe with today's keys, and which keys moved where.

    An old key beside its new one is left in place, so that validation refuses it as unknown.
    """
    upgraded = dict(plain)
    moved: dict[KeyPath, KeyPath] = {}
    for section, values in plain.items():
        if not isinstance(values, dict):
            continue
        paths = {name: renamed_path((section, name), value) for name, value in values.items()}
        taken = {path for name, path in paths.items() if path == (section, name)}
        for name, path in paths.items():
            if path in taken:
                paths[name] = (section, name)
            elif path != (section, name):
                moved[section, name] = path
        upgraded[section] = {paths[name][1]: value for name, value in values.items()}
    return upgraded, moved


def moved_paths(lines: Mapping[KeyPath, int], moved: Mapping[KeyPath, KeyPath]) -> dict[KeyPath, int]:
    """Line numbers under the paths of today."""
    return {(*moved[path[:2]], *path[2:]) if path[:2] in moved else path: line for path, line in lines.items()}


def _is_old_mode(value: Any) -> bool:
    """`protection.policy` used to be protect, observe or off, and is now a mapping of Policy fields.

    A list is a sweep over either.
    """
    values = value if isinstance(value, list) else [value]
    return not any(item is None or isinstance(item, dict) for item in values)

"""Replays an incident of a run that was started from a recipe: builds its model and optimizers without its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.incidents.replay_bundle import IncidentReplay, replay
from surefoot.journal.incident_folders import IncidentBundle, InvalidIncident, read_incident
from surefoot.train import speed
from surefoot.train.accumulation import check_loss
from surefoot.train.build import make_loss
from surefoot.train.make_model import make_model
from surefoot.train.mixed_precision import Precision
from surefoot.train.optimizers import make_optimizers
from surefoot.train.recipe import Recipe, load
from surefoot.train.recipe.errors import RecipeOrigin
from surefoot.train.recipe.validate_recipe import validate

_SHIPPED = "surefoot.models:"
"""The module of the models and losses that surefoot ships; others are imported only if the user names the recipe."""


def replay_recipe(path: Path, source: str | None = None, device: str = "cpu") -> IncidentReplay:
    """Replay a bundle with the parts of its recipe, or of the recipe `source`; raises InvalidIncident, RecipeError."""
    incident = read_incident(path)
    recipe = _recorded_recipe(incident) if source is None else load(source)[0]
    torch.set_num_threads(int(incident.info.get("threads") or torch.get_num_threads()))  # sums depend on it
    target = torch.device(device)
    speed.seed_everything(recipe.seed)
    model = make_model(recipe)
    precision = Precision(recipe.precision, target)
    precision.prepare(model)
    model.to(target)
    loss_function = make_loss(recipe)

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        with precision.forward():
            loss, count = check_loss(loss_function(model, batch), recipe.loss.factory)
        return loss if count is None else loss / max(count, 1)

    return replay(path, model, make_optimizers(model, recipe.optimizer), step_fn)


def _recorded_recipe(incident: IncidentBundle) -> Recipe:
    recorded = incident.info["run"].get("recipe")
    plain = recorded.get("resolved") if isinstance(recorded, Mapping) else None
    if not isinstance(plain, dict):
        raise InvalidIncident(
            f"{incident.path} is of a training loop of your own. Replay it from Python, with its model, optimizer and "
            "step_fn: surefoot.replay(path, model, optimizer, step_fn)"
        )
    foreign = sorted({name for name in _factories(plain, ("model", "loss")) if not name.startswith(_SHIPPED)})
    if foreign:
        raise InvalidIncident(
            f"{incident.path} was trained with code that surefoot does not ship ({', '.join(foreign)}), and nothing "
            "that a bundle names is imported. Name the recipe: surefoot replay INCIDENT --recipe mine.yaml"
        )
    plain = {name: value for name, value in plain.items() if name != "alarms"}  # without their secrets, no use
    if isinstance(log := plain.get("log"), Mapping):
        plain["log"] = {name: value for name, value in log.items() if name != "sinks"}
    return validate(plain, RecipeOrigin(f"{incident.path.name}/incident.json"))


def _factories(plain: Mapping[str, Any], sections: tuple[str, ...]) -> Iterator[str]:
    for section in sections:
        value = plain.get(section)
        yield str(value.get("factory", "") if isinstance(value, Mapping) else value or _SHIPPED)

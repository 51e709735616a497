"""Incident bundles: what a run leaves behind when it was hurt, and that it can be replayed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.journal.incident_folders import InvalidIncident
from surefoot.records import Cause

Batch = tuple[Tensor, Tensor]
TEACHER = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
POLICY = surefoot.Policy(snapshot_every=10, weights_every=10)


def batch_of(step: int) -> Batch:
    rng = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(32, 16, generator=rng)
    return x, (x @ TEACHER + 0.5 * torch.randn(32, 8, generator=rng)).argmax(1)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(
    run_dir: Path,
    steps: int,
    *,
    data: Callable[[int], Batch] = batch_of,
    damage: Callable[[int, nn.Module, torch.optim.Optimizer], None] = lambda step, model, optimizer: None,
    **given: Any,
) -> surefoot.Run:
    model, optimizer = parts()
    options = {"policy": POLICY, "step_fn": loss_of} | given
    with surefoot.attach(model, optimizer, run_dir=run_dir, **options) as guard:
        for step in range(steps):
            damage(step, model, optimizer)
            batch = data(step)
            guard.watch(loss_of(model, batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return surefoot.read(run_dir)


def damage_moments(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 120:
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(1e-10)


def with_nan(step: int) -> Batch:
    x, y = batch_of(step)
    return (torch.full_like(x, math.nan) if step == 60 else x), y


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> surefoot.Run:
    """A run whose optimizer state was damaged, and which a trial cured."""
    return train(tmp_path_factory.mktemp("hurt") / "run", 160, damage=damage_moments)


def test_a_trial_is_replayed_bit_for_bit_with_the_same_conclusion(hurt: surefoot.Run) -> None:
    incident = hurt.incidents[0]
    trial = incident.info["trial"]
    model, optimizer = parts()
    before = [p.detach().clone() for p in model.parameters()]
    result = surefoot.replay(incident.path, model, optimizer, loss_of)
    assert [b.branch for b in result.branches] == [b["branch"] for b in trial["branches"]]
    assert result.bit_equal
    assert result.best == trial["best"] != "nothing"
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert json.dumps(result.as_json())


def test_a_bundle_says_what_happened_without_being_replayed(hurt: surefoot.Run) -> None:
    info = hurt.incidents[0].info
    kinds = {event["kind"] for event in info["events"]}
    assert {"finding", "diagnosis"} <= kinds
    assert len(info["rows"]["loss"]) == 100
    assert info["run"]["config"]["optimizers"][0]["class"] == "AdamW"
    assert info["step_fn"].endswith(":loss_of")
    notes = [event for event in hurt.events if event["kind"] == "note" and event["name"] == "incident"]
    assert notes[0]["values"]["folder"] == hurt.incidents[0].path.name


def test_a_refused_update_is_lived_again(tmp_path: Path) -> None:
    run = train(tmp_path / "run", 80, data=with_nan)
    assert [incident.kind for incident in run.incidents] == ["refuse"]
    result = surefoot.replay(run.incidents[0].path, *parts(), loss_of)
    assert result.bit_equal
    assert result.origin is not None
    assert result.origin.cause is Cause.BAD_BATCH
    assert result.steps[-1].attempt == 60
    assert math.isnan(result.steps[-1].loss)
    assert all(math.isfinite(step.loss) for step in result.steps[:-1])


def test_data_is_left_out_on_request(tmp_path: Path) -> None:
    run = train(tmp_path / "run", 80, data=with_nan, incident_data=False)
    incident = run.incidents[0]
    assert not list(incident.path.glob("**/*.safetensors"))
    with pytest.raises(InvalidIncident, match="incident_data=False"):
        surefoot.replay(incident.path, *parts(), loss_of)


def test_without_step_fn_the_moment_is_described(tmp_path: Path) -> None:
    run = train(tmp_path / "run", 80, data=with_nan, step_fn=None)
    assert "no step_fn" in run.incidents[0].data_missing


def test_many_alarms_stay_within_the_limits(tmp_path: Path) -> None:
    def data(step: int) -> Batch:
        x, y = batch_of(step)
        return (torch.full_like(x, math.nan) if step % 110 == 60 else x), y

    run = train(tmp_path / "run", 1300, data=data)
    assert len(run.incidents) == 12
    with_data = [bool(list(incident.path.glob("**/*.safetensors"))) for incident in run.incidents]
    assert with_data == [True] * 2 + [False] * 4 + [True] * 6


def test_a_healthy_run_leaves_no_bundle(tmp_path: Path) -> None:
    assert train(tmp_path / "run", 100).incidents == []


def test_foreign_and_damaged_bundles_get_one_clear_message(hurt: surefoot.Run, tmp_path: Path) -> None:
    incident = hurt.incidents[0]
    with pytest.raises(InvalidIncident, match="not an incident bundle"):
        surefoot.replay(tmp_path, *parts(), loss_of)
    other = nn.Linear(3, 3)
    with pytest.raises(InvalidIncident, match="another model"):
        surefoot.replay(incident.path, other, torch.optim.AdamW(other.parameters()), loss_of)
    for name, content in (("incident.json", "{"), ("batches/steps.json", '{"steps": 3}')):
        damaged = tmp_path / name.replace("/", "-")
        damaged.mkdir()
        for file in incident.path.rglob("*"):
            if file.is_file():
                target = damaged / file.relative_to(incident.path)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(file.read_bytes())
        (damaged / name).write_text(content)
        with pytest.raises(InvalidIncident):
            surefoot.replay(damaged, *parts(), loss_of)

"""Trials of an attached run with `step_fn`: what they find, what the run continues from, and what they never do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from benchmarks.replay import replay
from surefoot.records import Action, Cause
from surefoot.trials.conclusion import TrialResult

STEPS, ONSET = 220, 120
POLICY = surefoot.Policy(snapshot_every=10, weights_every=10)
TEACHER = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
Batch = tuple[Tensor, Tensor]


def batch_of(step: int) -> Batch:
    """Noisy samples whose class follows from their inputs."""
    rng = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(32, 16, generator=rng)
    return x, (x @ TEACHER + 0.5 * torch.randn(32, 8, generator=rng)).argmax(1)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@dataclass
class Run:
    """A training loop with places for faults."""

    data: Callable[[int], Batch] = batch_of
    lr: Callable[[int], float] = lambda step: 3e-3
    damage: Callable[[int, nn.Module, torch.optim.Optimizer], None] = lambda step, model, optimizer: None
    step_fn: Callable[[nn.Module, Any], Tensor] | None = loss_of
    policy: surefoot.Policy = POLICY
    events: list[dict[str, Any]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    steps: int = 0

    def train(self, run_dir: Path | None, steps: int = STEPS) -> float:
        """Train, and return the loss on samples that no run trains on."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        given: dict[str, Any] = {"policy": self.policy, "step_fn": self.step_fn}
        guard = None if run_dir is None else surefoot.attach(model, optimizer, run_dir=run_dir, **given)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = self.lr(step)
            self.damage(step, model, optimizer)
            batch = self.data(step)
            loss = loss_of(model, batch)
            (loss if guard is None else guard.watch(loss, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if guard is not None and run_dir is not None:
            guard.close()
            self.steps = guard.step
            self.events = surefoot.read(run_dir).events
        self.weights = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            return sum(float(loss_of(model, batch_of(-1 - n))) for n in range(8)) / 8

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def continued(self) -> list[dict[str, Any]]:
        return [e for e in self.of_kind("trial") if e["result"] == TrialResult.CONTINUED]


@pytest.fixture(scope="module")
def fault_free() -> float:
    return Run().train(None)


def shrink_second_moments(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values() if step == ONSET else ():
        state["exp_avg_sq"].mul_(1e-10)


def enlarge_weights(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == ONSET:
        with torch.no_grad():
            model[2].weight.mul_(30.0)


def test_damaged_optimizer_state_is_undone_without_losing_an_update(tmp_path: Path, fault_free: float) -> None:
    bare = Run(damage=shrink_second_moments).train(None)
    run = Run(damage=shrink_second_moments)
    loss = run.train(tmp_path)

    assert bare > 1.05 * fault_free, "the fault does harm"
    assert loss < 1.05 * fault_free
    trial = run.continued[0]["values"]
    assert trial["best"] == "replay"
    assert trial["causes"] == [Cause.OPTIMIZER_STATE]
    assert trial["deviation_attempt"] in (ONSET, ONSET + 1)
    assert run.of_kind("diagnosis")[0]["cause"] == Cause.OPTIMIZER_STATE, "what the trial found comes first"
    assert run.steps == STEPS


def test_damaged_weights_are_told_from_damaged_optimizer_state(tmp_path: Path, fault_free: float) -> None:
    run = Run(damage=enlarge_weights)
    loss = run.train(tmp_path)

    assert loss < 1.05 * fault_free
    trial = run.continued[0]["values"]
    assert trial["deviation"] == "loss"
    assert trial["deviation_attempt"] == ONSET
    assert Cause.WEIGHTS_DAMAGED in trial["causes"]
    assert run.steps == STEPS


def test_gradients_that_something_leaves_behind_are_zeroed_from_then_on(tmp_path: Path) -> None:
    def leave_gradients(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters() if step >= ONSET else ():
            p.grad = torch.full_like(p, 0.05)

    bare, run = Run(damage=leave_gradients).train(None), Run(damage=leave_gradients)
    assert run.train(tmp_path) < 0.5 * bare
    last = run.continued[-1]["values"]
    assert last["deviation"] == "gradient"
    assert Cause.ACCUMULATION in last["causes"]
    assert Cause.TRANSIENT not in last["causes"]
    assert last["carried_out"]["overrides"]["zero_all_grads"]


def test_a_learning_rate_that_harms_is_named_and_capped_for_the_steps_since(tmp_path: Path, fault_free: float) -> None:
    def lr(step: int) -> float:
        return 0.5 if step >= ONSET else 3e-3

    run = Run(lr=lr)
    loss = run.train(tmp_path)

    assert loss < 1.1 * fault_free
    trial = run.continued[0]["values"]
    assert trial["deviation"] == "none", "the replay with the same settings goes wrong in the same way"
    assert trial["best"] == "old_settings"
    assert Cause.LEARNING_RATE in trial["causes"]


def test_garbage_for_a_while_is_refused_while_it_comes_and_then_training_goes_on(tmp_path: Path) -> None:
    def data(step: int) -> Batch:
        x, y = batch_of(step)
        garbage = ONSET <= step < ONSET + 60
        return (8 * torch.randn(x.shape), torch.randint(8, y.shape)) if garbage else (x, y)

    bare, run = Run(data=data).train(None), Run(data=data)
    loss = run.train(tmp_path)

    assert loss < 1.02 * bare, "never worse than doing nothing"
    refused = {e["attempt"] for e in run.of_kind("decision") if e["action"] == Action.REFUSE}
    assert not refused & {*range(ONSET), *range(ONSET + 62, STEPS)}
    rows = surefoot.read(tmp_path).scalars
    assert (rows["verdict"][-30:] == 0).all(), "good batches are taken again"


def test_garbage_that_never_ends_stops_the_run(tmp_path: Path) -> None:
    def data(step: int) -> Batch:
        x, y = batch_of(step)
        return (8 * torch.randn(x.shape), torch.randint(8, y.shape)) if step >= ONSET else (x, y)

    run = Run(data=data)
    with pytest.raises(surefoot.TrainingStopped, match="updates in a row were refused"):
        run.train(tmp_path, steps=4 * STEPS)


def test_a_new_task_that_stays_is_learnt(tmp_path: Path) -> None:
    other = torch.randn(16, 8, generator=torch.Generator().manual_seed(4))

    def data(step: int) -> Batch:
        x, y = batch_of(step)
        return (x, (x @ other).argmax(1)) if step >= ONSET else (x, y)

    bare, run = Run(data=data), Run(data=data)
    bare.train(None, steps=2 * STEPS)
    run.train(tmp_path, steps=2 * STEPS)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    losses: list[float] = []
    for trained in (bare, run):
        for p, value in zip(model.parameters(), trained.weights, strict=True):
            p.data.copy_(value)
        with torch.no_grad():
            losses.append(sum(float(loss_of(model, data(2 * STEPS + n))) for n in range(8)) / 8)
    assert losses[1] < 1.2 * losses[0]


def test_a_healthy_run_with_step_fn_is_bit_equal_to_the_plain_loop(tmp_path: Path) -> None:
    plain, guarded = Run(), Run()
    plain.train(None, steps=90)
    guarded.train(tmp_path, steps=90)
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, guarded.weights, strict=True))


def test_a_step_fn_that_fails_is_journaled_and_the_rules_act_alone(tmp_path: Path, fault_free: float) -> None:
    def broken(model: nn.Module, batch: Batch) -> Tensor:
        raise KeyError("labels")

    run = Run(damage=enlarge_weights, step_fn=broken)
    loss = run.train(tmp_path)

    reasons = [e["detail"] for e in run.of_kind("trial")]
    assert reasons
    assert all("KeyError: 'labels'" in reason for reason in reasons)
    assert math.isfinite(loss)
    assert loss < 1.2 * fault_free
    assert any(e["action"] == Action.REWIND for e in run.of_kind("decision"))
    assert not [e for e in run.of_kind("note") if e["name"] == "degraded"]


@pytest.mark.parametrize("fault", ["moments", "lr", "garbage"])
def test_a_run_with_trials_replays_to_the_same_decisions(fault: str, tmp_path: Path) -> None:
    def garbage(step: int) -> Batch:
        x, y = batch_of(step)
        return (8 * torch.randn(x.shape), torch.randint(8, y.shape)) if ONSET <= step < ONSET + 20 else (x, y)

    runs = {
        "moments": Run(damage=shrink_second_moments),
        "lr": Run(lr=lambda step: 0.5 if step >= ONSET else 3e-3),
        "garbage": Run(data=garbage),
    }
    runs[fault].train(tmp_path)
    assert runs[fault].of_kind("trial")
    replayed = replay(tmp_path)
    assert replayed.recorded
    assert not replayed.differences


def test_a_run_too_hot_from_its_first_update_is_restarted_even_with_a_nan_batch_among_the_first(
    tmp_path: Path, fault_free: float
) -> None:
    def data(step: int) -> Batch:
        x, y = batch_of(step)
        return (torch.full_like(x, math.nan) if step in (3, 7) else x), y

    bare = Run(data=lambda step: batch_of(max(step, 8)), lr=lambda step: 1.0).train(None)
    run = Run(data=data, lr=lambda step: 1.0)
    final = run.train(tmp_path / "run")
    assert bare > 5 * fault_free
    assert final < 0.5 * bare
    restart = run.continued[0]["values"]
    assert restart["snapshot"] == -1
    assert all(math.isfinite(branch["probe_loss"]) for branch in restart["branches"][1:])


def test_a_restart_does_not_lower_a_learning_rate_that_the_loop_itself_has_lowered_since(
    tmp_path: Path, fault_free: float
) -> None:
    run = Run(lr=lambda step: 1.0 if step < 6 else 3e-3)
    loss = run.train(tmp_path)

    assert run.of_kind("decision")[0]["cause"] == Cause.SCHEDULE
    assert run.continued[0]["values"]["snapshot"] == -1
    restart = run.continued[0]["values"]["carried_out"]["overrides"]
    assert "lasting_lr_factor" not in restart
    assert restart["max_lr"][0] >= 3e-3
    assert loss < 1.1 * fault_free


def test_no_trials_with_trial_seconds_0(tmp_path: Path) -> None:
    policy = surefoot.Policy(snapshot_every=10, weights_every=10, trial_seconds=0)
    model = nn.Linear(16, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with surefoot.attach(model, optimizer, run_dir=tmp_path, policy=policy, step_fn=loss_of) as guard:
        for step in range(60):
            if step == 50:
                model.weight.data.mul_(1e4)
            batch = batch_of(step)
            guard.watch(loss_of(model, batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not [e for e in surefoot.read(tmp_path).events if e["kind"] == "trial"]


def test_rules_alone_lose_about_a_dozen_good_updates(tmp_path: Path, fault_free: float) -> None:
    """Snapshots that cost little are taken every few updates; a rewind needs one that healthy updates have followed."""
    run = Run(damage=enlarge_weights, step_fn=None, policy=surefoot.Policy(weights_every=10, snapshot_time_share=1.0))
    loss = run.train(tmp_path)

    rewound = [e["values"]["attempt"] for e in run.of_kind("note") if e["name"] == "rewound"]
    assert rewound
    assert ONSET - 17 <= rewound[0] < ONSET
    assert any("a snapshot every 5 updates: one takes" in e["detail"] for e in run.of_kind("note"))
    assert loss < 1.2 * fault_free
    assert not replay(tmp_path).differences

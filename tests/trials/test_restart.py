"""Which restart a trial picks, from the losses on its probe batches; what it means that inputs make no difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surefoot.checkpoint.train_state import TrainState
from surefoot.trials.branches import BranchId, BranchResult
from surefoot.trials.kept_steps import KeptStep, StepRecorder
from surefoot.trials.pairs import depends_on_pairs, ignores_pairs
from surefoot.trials.restart import RestartTrial, choose
from surefoot.trials.sandbox import Sandbox

INITIAL = [2.8, 2.9, 2.7, 2.8]


def trial_of(losses: dict[BranchId, list[float]], **fields: Any) -> RestartTrial:
    snapshot: Any = None
    trial = RestartTrial(snapshot, [], [], 1.0, reference=INITIAL, **fields)
    trial.results = {branch: BranchResult(branch, tuple(values)) for branch, values in losses.items()}
    choose(trial)
    return trial


def test_a_slightly_lower_loss_is_no_reason_to_restart_a_run_that_learns() -> None:
    losses = {BranchId.NOTHING: [0.60, 0.61, 0.59, 0.60], BranchId.RESTART_LR_03: [0.57, 0.58, 0.56, 0.57]}
    assert trial_of(losses).best is None


def test_it_is_where_the_run_ignores_its_inputs_and_the_restart_has_learnt_something_about_them() -> None:
    losses = {BranchId.NOTHING: [0.60, 0.61, 0.59, 0.60], BranchId.RESTART_LR_03: [0.57, 0.58, 0.56, 0.57]}
    trial = trial_of(losses, ignores_inputs=True, learnt_inputs={BranchId.RESTART_LR_03})
    assert trial.best is not None
    assert trial.best.id is BranchId.RESTART_LR_03
    assert trial_of(losses, ignores_inputs=True).best is None
    both = {BranchId.RESTART, BranchId.RESTART_LR_03}
    assert trial_of(losses, ignores_inputs=True, learnt_inputs=both).best is None, "the same settings teach them, too"


def kept_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Sandbox, list[KeptStep]]:
    def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (net(batch[0])[:, 0] - batch[1]).square().mean()

    sandbox = Sandbox(model, [optimizer], loss_of, TrainState(model, optimizer), loss_scale=lambda: None)
    recorder, rng = StepRecorder([optimizer], max_steps=50), torch.Generator().manual_seed(5)
    for number in range(8):
        x = torch.randn(32, 8, generator=rng)
        recorder.forward_began()
        recorder.watched((x, x.sum(1)))
        recorder.before_step(0)
        recorder.step_ended(number)
    return sandbox, recorder.since(0)


def test_a_model_whose_units_are_all_dead_ignores_its_inputs_and_a_trained_one_does_not() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    sandbox, steps = kept_steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ignores_pairs(sandbox, steps)
    assert depends_on_pairs(sandbox, steps) is False

    linear = nn.Linear(8, 1)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    sandbox, steps = kept_steps(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    assert depends_on_pairs(sandbox, steps)
    assert not ignores_pairs(sandbox, steps)

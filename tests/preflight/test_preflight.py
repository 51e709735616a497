"""`surefoot.preflight`: what it says about loops with one thing wrong, and that it leaves no trace."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from preflight_loops import causes, check, decoder, mse, regression, sure_causes
from torch import Tensor, nn

import surefoot
from benchmarks.silent_bugs import tasks
from benchmarks.silent_bugs.small_models import SequenceRegressor, TokenDecoder, with_lora
from surefoot.preflight_checks.findings import PreflightReport


def state_of(loop: Any) -> Any:
    return copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict(), torch.get_rng_state()))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("build", [tasks.decoder_loop, tasks.image_loop, tasks.masked_loop, tasks.contrastive_loop])
def test_a_healthy_loop_is_passed(build: Any) -> None:
    torch.manual_seed(0)
    report = check(build())
    assert not report.findings, report


def test_everything_is_as_it_was() -> None:
    loop = regression(nn.Sequential(nn.BatchNorm1d(12), nn.Dropout(0.1), nn.Linear(12, 1)))
    loss = loop.step_fn(loop.model, loop.batches[0])
    loss.backward()
    loop.optimizer.step()  # so that the optimizer has a state
    grads = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
    batches = copy.deepcopy(loop.batches)
    loop.model.eval()
    before = state_of(loop)
    check(loop)
    assert same(before, state_of(loop))
    assert same(grads, [p.grad for p in loop.model.parameters()])
    assert same(batches, loop.batches)
    assert not loop.model.training


def test_a_loader_continues_where_it_was() -> None:
    loop = regression()
    data = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*loop.batches, strict=True)))
    generator = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, generator=generator)
    surefoot.preflight(loop.model, loop.optimizer, loader, loop.step_fn)
    generator_as_new = torch.Generator().manual_seed(5)
    assert torch.equal(generator.get_state(), generator_as_new.get_state())


def test_batches_that_can_be_read_once_are_refused() -> None:
    loop = regression()
    with pytest.raises(TypeError, match="iterator"):
        surefoot.preflight(loop.model, loop.optimizer, iter(loop.batches), loop.step_fn)


def test_the_report_as_json_comes_back() -> None:
    loop = regression()
    loop.step_fn = lambda m, b: -mse(m, b)
    report = check(loop)
    values = json.loads(json.dumps(report.as_json()))
    assert not values["passed"]
    assert values["findings"][0]["certainty"] == "sure"
    assert str(PreflightReport.from_json(values).findings[0].cause) == "loss_function"


def test_a_decoder_that_sees_the_future() -> None:
    report = check(decoder(TokenDecoder(look_ahead=True)))
    assert "leak" in sure_causes(report)


def test_a_recurrent_network_that_reads_both_ways() -> None:
    torch.manual_seed(0)
    report = check(tasks.recurrent_loop(SequenceRegressor(both_ways=True)))
    assert "leak" in sure_causes(report)


@pytest.mark.parametrize("shift", [0, 2])
def test_labels_with_the_wrong_shift(shift: int) -> None:
    loop = decoder()
    loop.step_fn = lambda m, b: F.cross_entropy(m(b)[:, : 16 - shift].flatten(0, 1), b[:, shift:].flatten())
    report = check(loop)
    assert "labels" in sure_causes(report)


def test_labels_of_masked_tokens_are_no_leak() -> None:
    torch.manual_seed(0)
    assert not {"labels", "leak"} & causes(check(tasks.masked_loop()))


def test_softmax_twice_and_a_broadcast() -> None:
    loop = tasks.image_loop()
    loop.step_fn = lambda m, b: F.cross_entropy(m(b[0]).softmax(-1), b[1])
    assert "loss_function" in sure_causes(check(loop))
    loop = regression()
    loop.step_fn = lambda m, b: (m(b[0]) - b[1]).square().mean()
    assert "loss_function" in sure_causes(check(loop))


def test_parameters_that_are_not_trained() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 1)
            self.middle = [nn.Linear(8, 8)]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle[0](self.first(x).relu()))

    report = check(regression(Hidden()))
    finding = next(f for f in report.sure if f.cause == "unregistered")
    assert "middle" in finding.what
    assert "test_preflight.py" in finding.where

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).detach().relu())

    finding = next(f for f in check(regression(Detached())).sure if f.cause == "detached")
    assert "first" in finding.what


def test_adapters_are_healthy_and_adapters_of_zero_are_not() -> None:
    model = with_lora(TokenDecoder())
    held = [p for p in model.parameters() if p.requires_grad]
    assert not check(decoder(model, optimizer=torch.optim.AdamW(held, lr=2e-3))).sure
    for name, p in model.named_parameters():
        if "lora_a" in name:
            nn.init.zeros_(p)
    report = check(decoder(model, optimizer=torch.optim.AdamW(held, lr=2e-3)))
    assert sure_causes(report) & {"dead_units", "symmetry"}


def test_units_that_are_identical() -> None:
    loop = regression()
    for p in loop.model.parameters():
        nn.init.constant_(p, 0.05)
    assert "symmetry" in sure_causes(check(loop))


def test_rates_that_are_too_high_and_too_low() -> None:
    loop = regression()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=50.0)
    report = check(loop)
    assert "learning_rate" in sure_causes(report)
    assert report.proposed_lr is not None
    assert report.proposed_lr < 50
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-9)
    report = check(loop)
    assert "learning_rate" in causes(report)


def test_updates_that_bfloat16_rounds_away() -> None:
    loop = regression(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1)).bfloat16())
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-6)
    loop.step_fn = lambda m, b: mse(m, (b[0].bfloat16(), b[1].bfloat16()))
    assert "precision_underflow" in sure_causes(check(loop))


def test_a_schedule_that_ends_too_early() -> None:
    loop = regression()
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=10, gamma=0.1)
    before = scheduler.state_dict()
    report = check(loop, scheduler=scheduler, total_steps=500)
    assert "schedule" in sure_causes(report)
    assert scheduler.state_dict() == before


def test_an_error_of_step_fn_is_the_callers() -> None:
    loop = regression()
    with pytest.raises(RuntimeError):
        surefoot.preflight(loop.model, loop.optimizer, [(torch.zeros(4, 3), torch.zeros(4))], loop.step_fn)

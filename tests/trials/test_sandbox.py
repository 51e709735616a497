"""Whatever is tried in a sandbox, the run afterwards is bit for bit as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot.checkpoint.train_state import TrainState
from surefoot.trials.kept_steps import KeptStep, StepRecorder
from surefoot.trials.sandbox import Sandbox, StepFnFailed


class Net(nn.Module):
    """Dropout draws random numbers and batch norm has buffers: both must be as if nothing had been run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    random.random()  # a loss that draws from every generator
    np.random.random()
    return (model(batch[0])[:, 0] - batch[1]).square().mean()


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(5)
    for _ in range(count):
        x = torch.randn(12, 8, generator=rng)
        yield x, x.sum(1)


OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}


def train(optimizer_name: str, *, with_trials: bool) -> tuple[list[Tensor], list[Tensor], float, float, Tensor]:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = Net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    state = TrainState(model, optimizer, scheduler=scheduler)
    recorder = StepRecorder([optimizer], max_steps=50)
    sandbox = Sandbox(model, [optimizer], loss_of, state, loss_scale=lambda: None)
    snapshot = state.capture()
    for number, batch in enumerate(batches(30)):
        recorder.forward_began()
        recorder.watched(batch)
        loss_of(model, batch).backward()
        recorder.before_step(0)
        optimizer.step()
        recorder.step_ended(number)
        if with_trials and number % 10 == 7:
            grads = [p.grad for p in model.parameters()]
            try_something(sandbox, recorder, snapshot)
            assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))
        optimizer.zero_grad()
        scheduler.step()
    state_tensors = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return [*model.state_dict().values()], state_tensors, random.random(), np.random.random(), torch.rand(3)


def try_something(sandbox: Sandbox, recorder: StepRecorder, snapshot: object) -> None:
    steps = recorder.since(0)
    with sandbox.opened() as now:
        sandbox.losses(steps[:3])
        sandbox.restore(snapshot)  # type: ignore[arg-type]
        for step in steps:
            sandbox.train_step(step, options=step.options, max_norm=0.5)
        sandbox.restore(now)
        with sandbox.float32(enabled=True):
            sandbox.train_step(steps[-1], options=step.options)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_after_trials_is_bit_equal_to_training_without(optimizer: str) -> None:
    weights, state, *numbers, tail = train(optimizer, with_trials=False)
    tried_weights, tried_state, *tried_numbers, tried_tail = train(optimizer, with_trials=True)

    assert all(torch.equal(a, b) for a, b in zip(weights, tried_weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state, tried_state, strict=True))
    assert numbers == tried_numbers
    assert torch.equal(tail, tried_tail)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replayed_steps_lead_to_the_same_weights_bit_for_bit(optimizer: str) -> None:
    torch.manual_seed(1)
    model = Net()
    opt = OPTIMIZERS[optimizer](model.parameters())
    state = TrainState(model, opt)
    recorder = StepRecorder([opt], max_steps=50)
    sandbox = Sandbox(model, [opt], loss_of, state, loss_scale=lambda: None)
    start = None
    for number, batch in enumerate(batches(12)):
        if number == 4:  # every optimizer has its state by then
            start = state.capture()
        recorder.forward_began()
        for half in ((batch[0][:6], batch[1][:6]), (batch[0][6:], batch[1][6:])):
            recorder.watched(half)
            loss = loss_of(model, half) / 2
            loss.backward()
            recorder.backward_ended(torch.ones(()))
        recorder.before_step(0)
        opt.step()
        opt.zero_grad()
        recorder.step_ended(number)
    assert start is not None
    expected = [p.detach().clone() for p in model.parameters()]

    with sandbox.opened():
        sandbox.restore(start)
        for step in recorder.since(4):
            sandbox.train_step(step, options=step.options)
        assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


def test_an_error_in_step_fn_leaves_the_run_as_it_was() -> None:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def broken(model: nn.Module, batch: object) -> Tensor:
        loss_of(model, next(batches(1))).backward()
        raise KeyError("labels")

    sandbox = Sandbox(model, [optimizer], broken, TrainState(model, optimizer), loss_scale=lambda: None)
    recorder = StepRecorder([optimizer], max_steps=5)
    recorder.forward_began()
    recorder.watched(next(batches(1)))
    recorder.before_step(0)
    recorder.step_ended(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(StepFnFailed, match="KeyError: 'labels'"), sandbox.opened():
        sandbox.train_step(recorder.since(0)[0], options=recorder.since(0)[0].options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


def test_an_error_in_backward_is_reported_like_one_of_step_fn() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fails(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return FailsInBackward.apply(loss_of(model, batch))  # type: ignore[no-any-return]

    sandbox = Sandbox(model, [optimizer], fails, TrainState(model, optimizer), loss_scale=lambda: None)
    recorder = StepRecorder([optimizer], max_steps=5)
    recorder.forward_began()
    recorder.watched(next(batches(1)))
    recorder.before_step(0)
    recorder.step_ended(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StepFnFailed, match="RuntimeError: out of memory"), sandbox.opened():
        sandbox.train_step(recorder.since(0)[0], options=recorder.since(0)[0].options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_batches_written_in_place_are_copied_once_that_is_seen() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = StepRecorder([optimizer], max_steps=10)
    buffer = torch.zeros(4, 8)
    for number in range(5):
        buffer.fill_(float(number))
        recorder.forward_began()
        recorder.watched(buffer)
        recorder.before_step(0)
        recorder.step_ended(number)

    usable: list[KeptStep] = recorder.since(2)  # the first was overwritten before that could be noticed
    assert [float(step.batches[0].mean()) for step in usable] == [2.0, 3.0, 4.0]

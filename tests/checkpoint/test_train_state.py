"""A run that is captured and restored continues bit for bit."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parent))
import rewind_runs
from rewind_runs import Run, same, train_state_of

from surefoot.checkpoint.train_state import StateCopy

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def assert_restore_is_exact(build: Callable[[], Run], *, location: Any = "device") -> None:
    """Six steps equal three steps, a capture, other steps and one with NaN, a restore and three more steps."""
    undisturbed = build()
    for i in range(6):
        undisturbed.train(i)
    run = build()
    for i in range(3):
        run.train(i)
    state = train_state_of(run).capture(location=location)
    before, addresses = run.contents(), run.addresses()
    for i in range(7, 10):
        run.train(i)
    run.train(10, math.nan)
    assert not same(before, run.contents())
    train_state_of(run).restore(state)
    assert same(before, run.contents()), "restored bit for bit"
    if run.implementation != "closure":  # LBFGS creates new tensors in every step
        assert run.addresses() == addresses, "in place"
    assert all(p.grad is None for p in run.model.parameters())
    for i in range(3, 6):
        run.train(i)
    assert same(undisturbed.contents(), run.contents()), "continues as if it had never diverged"


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(("name", "implementation"), rewind_runs.optimizer_variants())
def test_every_optimizer_is_restored_exactly(name: str, implementation: str) -> None:
    assert_restore_is_exact(lambda: Run(name, implementation))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_model(backend: str) -> None:
    def build() -> Run:
        run = Run(implementation="fused")
        run.model = torch.compile(run.model, backend=backend)  # pyright: ignore[reportAttributeAccessIssue]
        run.forward = run.model
        return run

    assert_restore_is_exact(build)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], list[Any]]] = {
    "lambda": lambda o: [lr_scheduler.LambdaLR(o, lambda step: 0.9**step)],
    "one cycle": lambda o: [lr_scheduler.OneCycleLR(o, 0.1, total_steps=40)],
    "steps": lambda o: [lr_scheduler.MultiStepLR(o, [2, 4, 8])],
    "plateau": lambda o: [lr_scheduler.ReduceLROnPlateau(o, patience=0)],
    "restarts": lambda o: [lr_scheduler.CosineAnnealingWarmRestarts(o, 2)],
    "chained": lambda o: [
        lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)])
    ],
    "several": lambda o: [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_scheduler_is_restored_exactly(name: str) -> None:
    def build() -> Run:
        run = Run()
        run.schedulers = SCHEDULES[name](run.optimizer)
        return run

    assert_restore_is_exact(build)


class Warmup:
    """A scheduler with another one in its state: a deep copy of that state would copy its optimizer too."""

    def __init__(self, after: lr_scheduler.LRScheduler) -> None:
        self.after = after
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > 2:
            self.after.step()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_nested_scheduler_keeps_its_optimizer() -> None:
    def build() -> Run:
        run = Run()
        run.schedulers = [Warmup(lr_scheduler.StepLR(run.optimizer, 1))]
        return run

    assert_restore_is_exact(build)
    run = build()
    train_state_of(run).restore(train_state_of(run).capture())
    assert run.schedulers[0].after.optimizer is run.optimizer


@pytest.mark.parametrize("implementation", ["plain", "fused"])
def test_loss_scaling(implementation: str) -> None:
    assert_restore_is_exact(lambda: Run("SGD", implementation, scaled=True))


@pytest.mark.parametrize("implementation", ["plain", "fused"])
@pytest.mark.parametrize("captured", ["never used", "between steps", "inside a step"])
def test_found_inf_of_a_bad_step_does_not_change_the_restored_loss_scale(captured: str, implementation: str) -> None:
    """When restored inside a step, the scaler's update with that step's found_inf is still to come."""
    run = Run("SGD", implementation, scaled=True)
    assert run.scaler is not None
    states: list[StateCopy] = []
    if captured == "never used":
        states.append(train_state_of(run).capture())
    else:
        run.train(0)
        run.train(1)
        run.train(
            2, midway=(lambda: states.append(train_state_of(run).capture())) if captured == "inside a step" else None
        )
        if captured == "between steps":
            states.append(train_state_of(run).capture())
    expected = run.scaler.state_dict()
    run.train(3, math.inf)
    run.train(4)
    assert run.scaler.state_dict() != expected
    run.train(5, math.inf if implementation == "fused" else 1.0, midway=lambda: train_state_of(run).restore(states[0]))
    assert run.scaler.state_dict() == expected


@pytest.mark.parametrize("implementation", ["plain", "fused"])
def test_capture_and_restore_inside_a_step_are_exact(implementation: str) -> None:
    """As in an optimizer hook, the scaler's update and the scheduler's step come after capture and restore."""

    def build() -> Run:
        run = Run("SGD", implementation, scaled=True)
        run.schedulers = [lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=40)]
        return run

    undisturbed = build()
    for i in range(6):
        undisturbed.train(i)
    run = build()
    states: list[StateCopy] = []
    for i in range(3):
        run.train(i, midway=None if i < 2 else lambda: states.append(train_state_of(run).capture()))
    for i in range(7, 10):
        run.train(i)
    run.train(10, math.inf if implementation == "fused" else 1e4, midway=lambda: train_state_of(run).restore(states[0]))
    for i in range(3, 6):
        run.train(i)
    assert same(undisturbed.contents(), run.contents())


def test_restore_removes_new_state_and_recreates_lost_state() -> None:
    run = Run()
    early = train_state_of(run).capture()
    run.train(0)
    run.train(1)
    late, expected = train_state_of(run).capture(), run.contents()
    train_state_of(run).restore(early)
    assert not run.optimizer.state
    train_state_of(run).restore(late)
    assert same(expected, run.contents()), "all state is recreated"
    del run.optimizer.state[run.model.get_parameter("first.weight")]
    run.optimizer.param_groups[0]["lr"] = 7.0
    train_state_of(run).restore(late)
    assert same(expected, run.contents())


def test_second_capture_allocates_nothing() -> None:
    run = Run("Adam", "fused")
    run.train(0)
    run.train(1)
    first = train_state_of(run).capture()
    pointers = [t.data_ptr() for t in first.tensors]
    run.train(2)
    second = train_state_of(run).capture(first)
    assert second is first
    assert [t.data_ptr() for t in second.tensors] == pointers
    assert not set(pointers) & set(run.addresses())
    expected = run.contents()
    run.train(3)
    train_state_of(run).restore(second)
    assert same(expected, run.contents())
    assert second.nbytes == sum(t.nbytes for t in second.tensors) > 4 * sum(p.nbytes for p in run.model.parameters())


def test_capture_of_a_grown_run_reuses_memory() -> None:
    run = Run()
    copy = train_state_of(run).capture()
    pointers = {t.data_ptr() for t in copy.tensors}
    run.train(0)
    train_state_of(run).capture(copy)
    assert pointers < {t.data_ptr() for t in copy.tensors}


@needs_cuda
@pytest.mark.parametrize("location", ["device", "host"])
@pytest.mark.parametrize("implementation", ["plain", "fused"])
def test_restore_on_cuda(implementation: str, location: str) -> None:
    assert_restore_is_exact(lambda: Run(implementation=implementation, device="cuda", scaled=True), location=location)


@needs_cuda
def test_host_copy_in_progress_is_consistent_while_training_continues() -> None:
    run = Run(implementation="fused", device="cuda")
    run.model.register_buffer("large", torch.zeros(1 << 26, device="cuda"))
    weight = nn.Parameter(torch.zeros(1 << 26, device="cuda"))
    run.optimizer.add_param_group({"params": [weight]})
    run.train(0)
    state = train_state_of(run).capture(location="host")
    assert all(t.device.type == "cpu" for t in state.tensors)
    run.model.get_buffer("large").fill_(1.0)  # as the next forward pass would
    state.wait_on_device()
    weight.data.fill_(1.0)  # as the next step would
    train_state_of(run).restore(state)
    assert not weight.any()
    assert not run.model.get_buffer("large").any()

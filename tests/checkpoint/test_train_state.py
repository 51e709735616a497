"""A run that is captured and restored trains on bit by bit like one that never was."""

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
from rewind_runs import Run, same, whole

from surefoot.checkpoint.train_state import StateCopy

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def leaves_and_returns(build: Callable[[], Run], *, location: Any = "device") -> None:
    """Trains 6 steps straight; then 3, away with a poisoned step, back, and on: both must end alike."""
    straight = build()
    for i in range(6):
        straight.train(i)
    run = build()
    for i in range(3):
        run.train(i)
    state = whole(run).capture(location=location)
    before, at = run.contents(), run.addresses()
    for i in range(7, 10):
        run.train(i)
    run.train(10, math.nan)
    assert not same(before, run.contents())
    whole(run).restore(state)
    assert same(before, run.contents()), "put back to the bit"
    if run.way != "closure":  # LBFGS makes its tensors anew in every step
        assert run.addresses() == at, "and in place"
    assert all(p.grad is None for p in run.model.parameters())
    for i in range(3, 6):
        run.train(i)
    assert same(straight.contents(), run.contents()), "and from there on as if it had never left"


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(("name", "way"), rewind_runs.ways())
def test_every_optimizer_trains_on_as_if_it_had_never_left(name: str, way: str) -> None:
    leaves_and_returns(lambda: Run(name, way))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model(backend: str) -> None:
    def build() -> Run:
        run = Run(way="fused")
        run.model = torch.compile(run.model, backend=backend)  # pyright: ignore[reportAttributeAccessIssue]
        run.forward = run.model
        return run

    leaves_and_returns(build)


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
def test_a_schedule(name: str) -> None:
    def build() -> Run:
        run = Run()
        run.schedulers = SCHEDULES[name](run.optimizer)
        return run

    leaves_and_returns(build)


class Warmup:
    """A schedule that carries the one after it in its state, as some do: copied, it would bring its optimizer along."""

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


def test_a_schedule_within_a_schedule_keeps_its_optimizer() -> None:
    def build() -> Run:
        run = Run()
        run.schedulers = [Warmup(lr_scheduler.StepLR(run.optimizer, 1))]
        return run

    leaves_and_returns(build)
    run = build()
    whole(run).restore(whole(run).capture())
    assert run.schedulers[0].after.optimizer is run.optimizer


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_loss_scaling(way: str) -> None:
    leaves_and_returns(lambda: Run("SGD", way, scaled=True))


@pytest.mark.parametrize("way", ["plain", "fused"])
@pytest.mark.parametrize("taken", ["never used", "between steps", "inside a step"])
def test_what_a_bad_step_found_does_not_reach_the_restored_loss_scale(taken: str, way: str) -> None:
    """Put back inside a step, the scaler's update by what that step found is still to come."""
    run = Run("SGD", way, scaled=True)
    assert run.scaler is not None
    states: list[StateCopy] = []
    if taken == "never used":
        states.append(whole(run).capture())
    else:
        run.train(0)
        run.train(1)
        run.train(2, midway=(lambda: states.append(whole(run).capture())) if taken == "inside a step" else None)
        if taken == "between steps":
            states.append(whole(run).capture())
    wanted = run.scaler.state_dict()
    run.train(3, math.inf)
    run.train(4)
    assert run.scaler.state_dict() != wanted
    run.train(5, math.inf if way == "fused" else 1.0, midway=lambda: whole(run).restore(states[0]))
    assert run.scaler.state_dict() == wanted


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_taken_and_put_back_inside_a_step_the_loop_goes_on_exactly(way: str) -> None:
    """The scaler's update and the schedule's step come after both, as they do in a hook."""

    def build() -> Run:
        run = Run("SGD", way, scaled=True)
        run.schedulers = [lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=40)]
        return run

    straight = build()
    for i in range(6):
        straight.train(i)
    run = build()
    states: list[StateCopy] = []
    for i in range(3):
        run.train(i, midway=None if i < 2 else lambda: states.append(whole(run).capture()))
    for i in range(7, 10):
        run.train(i)
    run.train(10, math.inf if way == "fused" else 1e4, midway=lambda: whole(run).restore(states[0]))
    for i in range(3, 6):
        run.train(i)
    assert same(straight.contents(), run.contents())


def test_state_made_after_the_capture_is_gone_and_lost_state_is_back() -> None:
    run = Run()
    early = whole(run).capture()
    run.train(0)
    run.train(1)
    late, then = whole(run).capture(), run.contents()
    whole(run).restore(early)
    assert not run.optimizer.state
    whole(run).restore(late)
    assert same(then, run.contents()), "all of it made anew"
    del run.optimizer.state[run.model.get_parameter("first.weight")]
    run.optimizer.param_groups[0]["lr"] = 7.0
    whole(run).restore(late)
    assert same(then, run.contents())


def test_a_second_capture_needs_no_new_memory() -> None:
    run = Run("Adam", "fused")
    run.train(0)
    run.train(1)
    first = whole(run).capture()
    pointers = [t.data_ptr() for t in first.tensors]
    run.train(2)
    again = whole(run).capture(first)
    assert again is first
    assert [t.data_ptr() for t in again.tensors] == pointers
    assert not set(pointers) & set(run.addresses())
    then = run.contents()
    run.train(3)
    whole(run).restore(again)
    assert same(then, run.contents())
    assert again.nbytes == sum(t.nbytes for t in again.tensors) > 4 * sum(p.nbytes for p in run.model.parameters())


def test_memory_that_fits_is_used_again_when_the_run_has_grown() -> None:
    run = Run()
    copy = whole(run).capture()
    pointers = {t.data_ptr() for t in copy.tensors}
    run.train(0)
    whole(run).capture(copy)
    assert pointers < {t.data_ptr() for t in copy.tensors}


@needs_cuda
@pytest.mark.parametrize("location", ["device", "host"])
@pytest.mark.parametrize("way", ["plain", "fused"])
def test_on_a_gpu(way: str, location: str) -> None:
    leaves_and_returns(lambda: Run(way=way, device="cuda", scaled=True), location=location)


@needs_cuda
def test_a_copy_on_its_way_to_the_host_is_whole_though_training_goes_on() -> None:
    run = Run(way="fused", device="cuda")
    run.model.register_buffer("large", torch.zeros(1 << 26, device="cuda"))
    weight = nn.Parameter(torch.zeros(1 << 26, device="cuda"))
    run.optimizer.add_param_group({"params": [weight]})
    run.train(0)
    state = whole(run).capture(location="host")
    assert all(t.device.type == "cpu" for t in state.tensors)
    run.model.get_buffer("large").fill_(1.0)  # as the next forward would
    state.wait_on_device()
    weight.data.fill_(1.0)  # as the next step would
    whole(run).restore(state)
    assert not weight.any()
    assert not run.model.get_buffer("large").any()

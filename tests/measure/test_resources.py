"""Samples in a batch, step times, memory and utilisation, and the environment of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from surefoot.measure.batch_stats import count_samples
from surefoot.measure.resources import StepTimer, SystemMonitor, describe_environment


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(7, 3), 7),
        ([torch.zeros(5), torch.zeros(9)], 5),
        ((torch.zeros(4, 2), {"y": 1}), 4),
        ({"text": "words", "tokens": torch.zeros(6, 2)}, 6),
        ({"deep": {"deeper": [torch.zeros(3)]}}, 3),
        ([torch.tensor(1.0), torch.zeros(2)], 2),
    ],
)
def test_samples_in_batches_of_any_structure(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


@pytest.mark.parametrize("batch", [None, 3, "text", [], {}, torch.tensor(1.0), [None, "a"]])
def test_samples_unknown(batch: Any) -> None:
    assert math.isnan(count_samples(batch))


def test_the_timer_separates_data_wait_from_compute() -> None:
    clock = StepTimer()
    clock.forward_began()
    first = clock.step_ended()
    assert all(map(math.isnan, first)), "the first step has no duration"
    assert math.isnan(clock.seconds_for(10))
    clock.forward_began()
    clock.forward_began()  # a second microbatch does not count as data wait
    seconds, wait = clock.step_ended()
    assert 0 <= wait <= seconds
    assert clock.seconds_for(10) > 0
    assert clock.seconds_for(-5) == 0
    seconds, wait = clock.step_ended()
    assert seconds >= 0
    assert math.isnan(wait), "no forward pass was seen"


def test_the_monitor_reads_only_when_due(device: torch.device) -> None:
    tensor = torch.ones(1000, device=device)
    machine = SystemMonitor(device, every=5.0)
    reading = machine.read()
    assert reading.memory >= tensor.nbytes
    assert reading.memory_peak >= reading.memory
    assert math.isnan(reading.utilisation) or 0 <= reading.utilisation <= 1
    assert math.isnan(machine.read().memory), "not due again so soon"


def test_the_environment_of_a_run(device: torch.device) -> None:
    environment = describe_environment(device)
    assert set(environment) == {"code", "seeds", "environment"}
    assert environment["environment"]["torch"] == torch.__version__
    assert describe_environment(device)["seeds"] == environment["seeds"], "reading the RNG states does not change them"

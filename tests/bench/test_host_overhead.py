"""The table of host time by part: every part is in it with a time above zero."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks.host_overhead import PARTS, TENSORS, measure, report
from surefoot.cli import app


def test_every_part_of_a_step_has_a_time() -> None:
    times = measure(5, "cpu", steps=8)
    assert set(times.parts) == set(PARTS)
    assert all(spent > 0 for spent in times.parts.values()), times.parts
    table = report([times], "cpu")
    assert all(part in table for part in PARTS)
    assert "| 5 |" in table


def test_timing_restores_the_patched_methods() -> None:
    before = [getattr(owner, name) for places in PARTS.values() for owner, name in places]
    measure(2, "cpu", steps=1)
    assert before == [getattr(owner, name) for places in PARTS.values() for owner, name in places]


def test_command_prints_a_line_for_each_number_of_tensors() -> None:
    done = CliRunner().invoke(app, ["bench", "host", "--device", "cpu", "--steps", "1"])
    assert done.exit_code == 0, done.output
    assert all(f"| {tensors} |" in done.output for tensors in TENSORS)


@pytest.mark.parametrize("device", ["abacus"])
def test_unknown_device_is_refused_with_advice(device: str) -> None:
    done = CliRunner().invoke(app, ["bench", "host", "--device", device])
    assert done.exit_code == 2
    assert "Use --device cpu" in done.output

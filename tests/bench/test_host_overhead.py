"""The table of host time by part: every part is there and has taken some."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks.host_overhead import PARTS, TENSORS, measure, report
from surefoot.cli import app


def test_every_part_of_a_step_has_its_time() -> None:
    found = measure(5, "cpu", steps=8)
    assert set(found.parts) == set(PARTS)
    assert all(spent > 0 for spent in found.parts.values()), found.parts
    told = report([found], "cpu")
    assert all(part in told for part in PARTS)
    assert "| 5 |" in told


def test_the_guard_is_as_it_was_after_it_was_timed() -> None:
    before = [getattr(home, name) for places in PARTS.values() for home, name in places]
    measure(2, "cpu", steps=1)
    assert before == [getattr(home, name) for places in PARTS.values() for home, name in places]


def test_the_command_prints_a_line_for_each_number_of_tensors() -> None:
    done = CliRunner().invoke(app, ["bench", "host", "--device", "cpu", "--steps", "1"])
    assert done.exit_code == 0, done.output
    assert all(f"| {tensors} |" in done.output for tensors in TENSORS)


@pytest.mark.parametrize("device", ["abacus"])
def test_a_device_that_is_not_there_is_told_with_the_way_out(device: str) -> None:
    done = CliRunner().invoke(app, ["bench", "host", "--device", device])
    assert done.exit_code == 2
    assert "Use --device cpu" in done.output

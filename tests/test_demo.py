from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot import demo
from surefoot.models import DecoderConfig


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CONFIG", DecoderConfig(vocab=256, width=32, layers=1, heads=2, context=32))
    monkeypatch.setattr(demo, "BATCH", 8)


def test_it_tells_the_story_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.show(steps=100, out=tmp_path, seed=0)
    told = capsys.readouterr().out
    assert "step   40   refused the update: the loss is nan" in told
    assert "step   65   refused the update: gradient norm" in told
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "run-1") in told


def test_the_bare_loop_dies_and_the_guarded_one_ends_near_the_undisturbed(tmp_path: Path) -> None:
    faults = {"poison": 40, "burst": 65}
    undisturbed = demo.train(steps=100, seed=0, faults={})
    bare = demo.train(steps=100, seed=0, faults=faults)
    guarded = demo.train(steps=100, seed=0, faults=faults, run_dir=tmp_path / "run")
    assert len(bare.losses) < 100
    assert math.isnan(bare.held_out)
    assert guarded.losses[:40] == undisturbed.losses[:40]
    assert guarded.held_out == pytest.approx(undisturbed.held_out, rel=0.05)


def test_the_burst_alone_ruins_the_bare_loop_too() -> None:
    undisturbed = demo.train(steps=100, seed=0, faults={})
    burst = demo.train(steps=100, seed=0, faults={"burst": 65})
    assert burst.held_out > 1.05 * undisturbed.held_out


def test_a_second_demo_leaves_the_first_one_alone(tmp_path: Path) -> None:
    demo.show(steps=100, out=tmp_path, seed=0)
    before = surefoot.read(tmp_path / "run-1").scalars["loss"].tolist()
    demo.show(steps=100, out=tmp_path, seed=1)
    assert surefoot.read(tmp_path / "run-1").scalars["loss"].tolist() == pytest.approx(before, nan_ok=True)
    assert surefoot.read(tmp_path / "run-2").scalars.rows == 100


def test_without_matplotlib_it_says_so_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    demo.show(steps=100, out=tmp_path, seed=0)
    assert "pip install matplotlib" in capsys.readouterr().out

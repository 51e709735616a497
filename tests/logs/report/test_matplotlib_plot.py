"""The plot written to a file by matplotlib."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_diagnoses import failed, healthy, made_curves

from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth, UnreadableInput
from surefoot.logs.report.matplotlib_plot import draw_picture
from surefoot.logs.run_curves import RunCurves, Series

STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", STARTS)
def test_suffix_selects_the_format(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"run{suffix}"
    draw_picture(failed(), path)
    assert path.read_bytes().startswith(STARTS[suffix])


def test_plot_has_every_logged_metric_and_the_onset(tmp_path: Path) -> None:
    draw_picture(failed(), tmp_path / "run.svg")
    drawn = (tmp_path / "run.svg").read_text(encoding="utf-8")
    for title in ("gradient norm", "learning rate", "loss scale", "val/loss", "began at 4,000"):
        assert f"<!-- {title} -->" in drawn
    draw_picture(healthy(curves=replace(made_curves(), grad_norm=RunCurves().grad_norm)), tmp_path / "run.svg")
    assert "gradient norm" not in (tmp_path / "run.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "losses", [[1.0], [float("nan")] * 3, [0.0, 0.0, 0.0], [-5.0, 1e30, -1e20], [1e-300, 1e300], [2.0, float("inf")]]
)
def test_nonfinite_numbers_can_be_plotted(losses: list[float], tmp_path: Path) -> None:
    made = RunCurves(loss=Series("cost in $ and \\frac 损失", np.arange(len(losses), dtype=float), np.array(losses)))
    draw_picture(failed(curves=made, sentence="lost $x_{ \\bad 损失"), tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_unknown_suffix_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match=r"run\.txt: the file name must end in \.png, \.svg, \.pdf"):
        draw_picture(failed(), tmp_path / "run.txt")


def test_diagnosis_without_curves_cannot_be_plotted(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match="nothing to draw"):
        draw_picture(LogDiagnosis(verdict=RunHealth.UNKNOWN, sentence="Nothing."), tmp_path / "run.png")


def test_missing_matplotlib_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnreadableInput, match=r"pip install 'surefoot\[plots\]'.*--html"):
        draw_picture(failed(), tmp_path / "run.png")

"""The raw logs of llm.c and of build-nanogpt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.formats import detect

LLM_C = """s:0 tel:11.0253
s:0 eval:0.2463
s:0 trl:11.0300 lr:0.000001 norm:15.2000
s:1 trl:10.9000 lr:0.000002 norm:12.10
s:2 trl:-nan lr:0.000003 norm:nan
s:250 tel:7.5000
"""
NANOGPT = """0 val 10.9511
0 hella 0.2463
0 train 10.955029
1 train 10.690001
250 val 5.9000
"""


@pytest.mark.parametrize(("text", "train"), [(LLM_C, [11.03, 10.9, np.nan]), (NANOGPT, [10.955029, 10.690001])])
def test_columns_are_named(tmp_path: Path, text: str, train: list[float]) -> None:
    path = tmp_path / "main.log"
    path.write_text(text)
    (table,) = detect.read_log(path)
    np.testing.assert_array_equal(table.columns["train loss"].values, train)
    assert len(table.columns["val loss"]) == 2
    assert table.columns["eval accuracy"].values[0] == 0.2463
    assert len(table.columns["step"]) == table.records


def test_onset_of_a_jump_is_in_steps(tmp_path: Path) -> None:
    loss = 3 + 8 * np.exp(-np.arange(900) / 100)
    loss[600:] = 9.5
    lines = [f"s:{step} trl:{value:.4f} lr:0.000600 norm:1.20" for step, value in enumerate(loss)]
    (tmp_path / "main.log").write_text("\n".join(lines) + "\n")
    diagnosis = diagnose(tmp_path / "main.log")
    assert (diagnosis.verdict, diagnosis.pattern, diagnosis.onset_step) == ("failed", "jump", 600)
    assert diagnosis.source["columns"]["rate"] == "lr"


def test_other_text_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {n}: train loss {9 - n / 10:.3f}, lr 0.1\n" for n in range(20)))
    (table,) = detect.read_log(path)
    assert table.format == "text"

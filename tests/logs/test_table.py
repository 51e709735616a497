"""A log of any length fits into memory, and thinning keeps its onset exact."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.logs import table as tables
from surefoot.logs.diagnose_log import diagnose_table
from surefoot.logs.table import TableBuilder


@pytest.mark.parametrize("at", [61_234, 223_457, 390_001])
def test_onset_of_a_jump_in_a_thinned_log_is_exact(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_VALUES_PER_COLUMN", 1 << 16)
    monkeypatch.setattr("surefoot.logs.symptoms.step_index.THINNED_LENGTH", 1 << 14)
    chance = np.random.default_rng(0)
    steps = np.arange(400_000, dtype=np.float64)
    loss = (2.2 + 8 * np.exp(-steps / 1e4)) * np.exp(chance.normal(0, 0.03, len(steps)))
    loss[at:] *= 1.5
    builder = TableBuilder()
    for first in range(0, len(steps), 10_000):
        builder.extend({"step": steps[first : first + 10_000], "loss": loss[first : first + 10_000]}, {})
    table = builder.build("csv", "log.csv")
    assert len(table.columns["loss"]) < 1 << 16
    diagnosis = diagnose_table(table)
    assert diagnosis.verdict != "healthy"
    assert diagnosis.onset_step == pytest.approx(at, abs=5)

"""How far the reading of a file has come."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.formats.log_source import LogSource, report_progress

TEXT = b"step 1 loss 2.0\n" * 20_000


@pytest.mark.parametrize("packed", [False, True])
def test_whoever_watches_is_told_of_every_byte_of_the_file(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(gzip.compress(TEXT) if packed else TEXT)
    told: list[tuple[str, int, int]] = []
    with report_progress(lambda *news: told.append(news)), LogSource.open(path) as source:
        assert b"".join(source.lines()) == TEXT
    size = path.stat().st_size
    assert sum(more for _, more, _ in told) == size
    assert {(where, whole) for where, _, whole in told} == {(str(path), size)}


def test_the_look_at_a_checkpoint_is_told_too(tmp_path: Path) -> None:
    weights = {f"{k}.weight": np.random.default_rng(k).normal(size=(8, 8)).astype(np.float32) for k in range(5)}
    (tmp_path / "model.safetensors").write_bytes(save(weights))
    told: list[tuple[int, int]] = []
    with report_progress(lambda _, more, size: told.append((more, size))):
        diagnose(tmp_path / "model.safetensors")
    assert told[-5:] == [(256, 1280)] * 5


def test_nobody_is_told_when_nobody_watches(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_bytes(TEXT)
    told: list[int] = []
    with report_progress(lambda _, more, __: told.append(more)):
        pass
    with LogSource.open(tmp_path / "train.log") as source:
        assert source.read_all() == TEXT
    assert told == []

"""Progress reports while a file is read."""

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
def test_progress_covers_every_byte_of_the_file(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(gzip.compress(TEXT) if packed else TEXT)
    progress: list[tuple[str, int, int]] = []
    with report_progress(lambda *update: progress.append(update)), LogSource.open(path) as source:
        assert b"".join(source.lines()) == TEXT
    size = path.stat().st_size
    assert sum(nbytes for _, nbytes, _ in progress) == size
    assert {(path_read, total) for path_read, _, total in progress} == {(str(path), size)}


def test_reading_a_checkpoint_reports_progress(tmp_path: Path) -> None:
    weights = {f"{k}.weight": np.random.default_rng(k).normal(size=(8, 8)).astype(np.float32) for k in range(5)}
    (tmp_path / "model.safetensors").write_bytes(save(weights))
    progress: list[tuple[int, int]] = []
    with report_progress(lambda _, nbytes, size: progress.append((nbytes, size))):
        diagnose(tmp_path / "model.safetensors")
    assert progress[-5:] == [(256, 1280)] * 5


def test_no_progress_is_reported_outside_the_context(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_bytes(TEXT)
    progress: list[int] = []
    with report_progress(lambda _, nbytes, __: progress.append(nbytes)):
        pass
    with LogSource.open(tmp_path / "train.log") as source:
        assert source.read_all() == TEXT
    assert progress == []

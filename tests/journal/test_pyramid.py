"""The pyramid agrees with the rows it sums up, whatever happens to the writer, and keeps what thinning drops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.journal import Journal, JournalLimits, read
from surefoot.journal.pyramid import FACTOR, FINITE, MAX, MEAN, MIN, NONFINITE, SCALAR_COLUMNS, SCALAR_WIDTH
from surefoot.journal.pyramid_reader import PyramidReader
from surefoot.records import LAYER_STATS, StepMetrics, Verdict

LOSS, REFUSED = SCALAR_COLUMNS.index("loss"), SCALAR_COLUMNS.index("refused")


def write(
    run_dir: Path,
    attempts: range,
    *,
    loss: dict[int, float] | None = None,
    norms: dict[int, list[float]] | None = None,
    names: tuple[str, ...] = ("a", "b"),
    **limits: Any,
) -> None:
    """Rows with loss attempt / 1000; `loss` and `norms` are exceptions."""
    journal = Journal(run_dir, info={}, on_failure=pytest.fail, limits=JournalLimits(queue_rows=1 << 20, **limits))
    journal.layout(names, [1] * len(names))
    for attempt in attempts:
        value = (loss or {}).get(attempt, attempt / 1000)
        verdict = Verdict.APPLIED if math.isfinite(value) else Verdict.NONFINITE
        row = StepMetrics(step=attempt, attempt=attempt, time=float(attempt), loss=value, norm=1.0, verdict=verdict)
        stats = np.ones((len(names), len(LAYER_STATS)), np.float32)
        stats[:, LAYER_STATS.index("nonfinite")] = 0
        stats[:, 0] = (norms or {}).get(attempt, [1.0] * len(names))
        journal.row(row, stats)
        if attempt % 200 == 0:
            assert journal.flush()
    journal.close()


def check_against_rows(run_dir: Path, max_buckets: int = 50) -> np.ndarray:
    """The buckets of the whole run hold every row once, and the extremes of all."""
    reader = PyramidReader(run_dir / "signals", "scalars")
    entries = reader.buckets([LOSS], 0, reader.last_attempt, max_buckets)
    loss = read(run_dir).scalars["loss"]
    assert entries["rows"].sum() == len(loss)
    assert len(entries) <= max(max_buckets + 2, len(loss) // SCALAR_WIDTH + 1)
    finite = loss[np.isfinite(loss)]
    stats = entries["stats"][:, 0]
    assert np.nanmin(stats[:, MIN]) == finite.min()
    assert np.nanmax(stats[:, MAX]) == finite.max()
    assert stats[:, FINITE].sum() == len(finite)
    assert stats[:, NONFINITE].sum() == len(loss) - len(finite)
    mean = np.nansum(stats[:, MEAN] * stats[:, FINITE]) / len(finite)
    assert mean == pytest.approx(finite.mean(dtype=np.float64), rel=1e-4)
    return entries


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1024, 1025, 1700])
@pytest.mark.parametrize("max_buckets", [3, 1000])
def test_buckets_agree_with_the_rows(tmp_path: Path, rows: int, max_buckets: int) -> None:
    write(tmp_path, range(rows), loss={rows // 2: math.nan, rows // 3: 99.0})
    check_against_rows(tmp_path, max_buckets)


def test_a_spike_and_a_nan_are_found_by_zooming_in(tmp_path: Path) -> None:
    write(tmp_path, range(3000), loss={1234: 77.0, 2345: math.nan})
    reader = PyramidReader(tmp_path / "signals", "scalars")
    for stat, value, expected in ((MAX, 77.0, 1234), (NONFINITE, 1.0, 2345)):
        first, last = 0, reader.last_attempt
        while last - first > 100:
            entries = reader.buckets([LOSS], first, last, 8)
            hit = entries[entries["stats"][:, 0, stat] == value]
            assert len(hit) == 1
            assert (int(hit["first"][0]), int(hit["attempt"][0])) != (first, last)
            first, last = int(hit["first"][0]), int(hit["attempt"][0])
        rows = reader.rows([LOSS, REFUSED], first, last)
        found = rows[rows["stats"][:, 0, stat] == value]
        assert found["attempt"].tolist() == [expected]
        assert found["stats"][0, 1, MAX] == (stat == NONFINITE)


@pytest.mark.parametrize("stop", [30, 64, 500, 1024, 1040, 1500])
def test_a_resumed_run_continues_its_pyramid(tmp_path: Path, stop: int) -> None:
    write(tmp_path, range(stop), loss={5: 50.0})
    write(tmp_path, range(stop, 2100))
    check_against_rows(tmp_path)
    assert len(list((tmp_path / "signals").glob("pyramid-scalars-*-0.bin"))) == 1


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("kept", [0, 100, 1000])
def test_a_pyramid_cut_short_by_a_kill_is_caught_up(tmp_path: Path, level: int, kept: int) -> None:
    write(tmp_path, range(2100), loss={2000: 50.0})
    complete = check_against_rows(tmp_path)
    file = tmp_path / "signals" / f"pyramid-scalars-000000-{level}.bin"
    content = file.read_bytes()
    file.write_bytes(content[: len(content.split(b"\n", 1)[0]) + 1 + kept])
    check_against_rows(tmp_path)  # the reader sums up the rest itself
    write(tmp_path, range(2100, 2101))
    again = check_against_rows(tmp_path)
    assert again["first"].tolist() == complete["first"].tolist()


def test_runs_without_a_pyramid_are_read_and_continued(tmp_path: Path) -> None:
    write(tmp_path, range(1500), loss={700: 50.0}, norms={400: [9.0, 1.0]})
    for file in (tmp_path / "signals").glob("pyramid-*"):
        file.unlink()
    check_against_rows(tmp_path)
    write(tmp_path, range(1500, 1600))
    check_against_rows(tmp_path)
    reader = PyramidReader(tmp_path / "signals", "layers")
    assert reader.buckets(None, 0, 1599, 10)["stats"][:, 0, MAX].max() == 9.0


def test_a_reader_follows_without_reading_again(tmp_path: Path) -> None:
    write(tmp_path, range(100))
    reader = PyramidReader(tmp_path / "signals", "scalars")
    assert not reader.refresh()
    for part in range(1, 12):
        write(tmp_path, range(100 * part, 100 * part + 100), loss={100 * part + 50: 10.0 + part})
        assert reader.refresh()
        assert reader.last_attempt == 100 * part + 99
        entries = reader.buckets([LOSS], 0, reader.last_attempt, 4)
        assert entries["rows"].sum() == 100 * part + 100
        assert entries["stats"][:, 0, MAX].max() == 10.0 + part
        fresh = PyramidReader(tmp_path / "signals", "scalars").buckets([LOSS], 0, reader.last_attempt, 4)
        assert fresh["rows"].tolist() == entries["rows"].tolist()


def test_a_layer_spike_outlives_the_thinning_of_its_rows(tmp_path: Path) -> None:
    spikes = {attempt: [1.0, 500.0 + attempt] for attempt in range(301, 401, 7)}
    write(tmp_path, range(6 * FACTOR * 256 // 4), norms=spikes | {310: [math.nan, 1.0]}, window=200)
    norms = read(tmp_path).layers["b"]["norm"]
    assert np.count_nonzero(norms > 2) < len(spikes)
    reader = PyramidReader(tmp_path / "signals", "layers")
    entries = reader.buckets(None, 0, reader.last_attempt, 20)
    assert np.nanmax(entries["stats"][:, 1, MAX]) == 500.0 + max(spikes)
    assert entries["stats"][:, 0, NONFINITE].sum() == 1
    assert reader.names == ("a", "b")


def test_changed_tensors_begin_a_new_part(tmp_path: Path) -> None:
    write(tmp_path, range(700), norms={650: [7.0, 1.0]})
    write(tmp_path, range(700, 1400), names=("b", "c"), norms={900: [8.0, 1.0]})
    reader = PyramidReader(tmp_path / "signals", "layers")
    assert reader.names == ("b", "c")
    entries = reader.buckets(None, 0, 1399, 1000)
    after = entries["first"] >= 700
    assert np.isnan(entries["stats"][~after, 1, MEAN]).all()
    assert entries["stats"][after, 0, MAX].max() == 8.0
    assert (entries["stats"][~after, 0, MIN] == 1).all()


def test_a_full_disk_for_the_pyramid_does_not_stop_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "signals").mkdir(parents=True)
    (tmp_path / "signals" / "pyramid-scalars-000000-1.bin").symlink_to("/dev/full")
    write(tmp_path, range(1400), loss={250: 50.0})
    check_against_rows(tmp_path)
    assert [record.message for record in caplog.records if "pyramid of scalars is no longer written" in record.message]

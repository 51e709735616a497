from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from surefoot.journal.reader import read
from surefoot.journal.row_file import (
    SCALARS_HEADER,
    BadHeader,
    RowFile,
    RowHeader,
    layers_header,
    load_rows,
    map_rows,
    read_header,
)
from surefoot.journal.segments import list_segments, make_segment, open_segment, remove_leftovers
from surefoot.records import LAYER_STATS, StepMetrics


def scalars(*attempts: int) -> np.ndarray:
    rows = np.zeros(len(attempts), SCALARS_HEADER.dtype)
    rows["attempt"] = attempts
    return rows


def test_a_million_scalar_rows_stay_under_200_mb() -> None:
    assert SCALARS_HEADER.dtype.names == tuple(f.name for f in fields(StepMetrics))
    assert SCALARS_HEADER.dtype.itemsize * 1_000_000 < 200_000_000


def test_truncation_at_any_byte_costs_only_the_last_row(tmp_path: Path) -> None:
    path = tmp_path / "signals" / "scalars-000000.bin"
    path.parent.mkdir()
    file = RowFile(path, SCALARS_HEADER)
    file.append(scalars(0, 1, 2))
    file.close()
    content = path.read_bytes()
    _, start, rows = read_header(path)
    assert rows == 3
    for end in (*range(0, start, 41), *range(start, len(content))):
        path.write_bytes(content[:end])
        expected = list(range(max(0, end - start) // SCALARS_HEADER.dtype.itemsize))
        run = read(tmp_path)
        assert run.scalars.rows == len(expected)
        assert end < start or run.scalars["attempt"].tolist() == expected
        if end >= start:  # the next writer truncates the torn row first
            file = RowFile(path, SCALARS_HEADER)
            file.append(scalars(9))
            file.close()
            assert map_rows(path)[1]["attempt"].tolist() == [*expected, 9]
            assert load_rows(path, last=2)[1]["attempt"].tolist() == [*expected, 9][-2:]


def test_file_with_a_truncated_header_is_kept_and_a_new_one_started(tmp_path: Path) -> None:
    folder = tmp_path / "signals"
    folder.mkdir()
    torn = make_segment(folder, "scalars", 4).path
    torn.write_bytes(SCALARS_HEADER.encode()[:50])
    where, file = open_segment(folder, SCALARS_HEADER)
    file.append(scalars(7))
    file.close()
    assert where.path.name == "scalars-000005.bin"
    run = read(tmp_path)
    assert run.scalars["attempt"].tolist() == [7]
    assert any("scalars-000004.bin ignored" in note for note in run.notes)
    assert torn.read_bytes() == SCALARS_HEADER.encode()[:50]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"columns": [["step", "<i8", []], ["attempt", "O", []]]},
        {"columns": [["step", "<i8", []]]},
        {"columns": [["step", "<i8", []], ["attempt", "<i8", [10**30]]]},
        {"columns": 3},
        {"landed_stride": 0},
        {"covers": "x"},
    ],
)
def test_an_invalid_header_is_refused(change: dict[str, object]) -> None:
    raw = json.loads(SCALARS_HEADER.encode()) | change
    with pytest.raises(BadHeader):
        RowHeader.decode(json.dumps(raw).encode() + b"\n")


@pytest.mark.parametrize("line", [b"", b"\n", b"\x00\xff\n", b"[]\n", b"{}\n", b"3\n"])
def test_garbage_is_not_a_header(line: bytes) -> None:
    with pytest.raises(BadHeader):
        RowHeader.decode(line)


def test_header_round_trip_ignores_unknown_fields() -> None:
    header = layers_header(["a", "b.\ud800\n"], [3, 4])
    assert RowHeader.decode(header.encode()) == header
    assert len(header.encode()) % 64 == 0
    raw = json.loads(header.encode()) | {"future": 1}
    assert RowHeader.decode(json.dumps(raw).encode() + b"\n") == header
    assert header.dtype["stats"].shape == (2, len(LAYER_STATS))


def test_rows_of_another_version_stay_readable_beside_ours(tmp_path: Path) -> None:
    folder = tmp_path / "signals"
    folder.mkdir()
    older = replace(SCALARS_HEADER, columns=(("step", "<i4", ()), ("attempt", "<i4", ()), ("gone", "<f8", ())))
    _, file = open_segment(folder, older)
    file.append(np.array([(1, 2, 0.5)], older.dtype))
    file.close()
    _, file = open_segment(folder, SCALARS_HEADER)
    file.append(scalars(3))
    file.close()
    run = read(tmp_path)
    assert run.scalars["attempt"].tolist() == [2, 3]
    assert run.scalars["gone"][0] == 0.5
    assert np.isnan(run.scalars["gone"][1])
    assert np.isnan(run.scalars["loss"][0])


def test_a_merged_file_replaces_its_sources(tmp_path: Path) -> None:
    names = ["layers-000000.bin", "layers-000001.bin", "layers-000000-000001.bin", "layers-000002.bin"]
    for name in [*names, "scalars-000000.bin", "layers-000009.bin.tmp", "layers-x.bin"]:
        (tmp_path / name).touch()
    assert [segment.path.name for segment in list_segments(tmp_path, "layers")] == names[2:]
    remove_leftovers(tmp_path)
    expected = {*names[2:], "scalars-000000.bin", "layers-x.bin"}
    assert {path.name for path in tmp_path.iterdir()} == expected

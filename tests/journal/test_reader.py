from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import surefoot
from surefoot.journal import Journal, read, reader
from surefoot.journal.row_file import RowHeader, map_rows
from surefoot.records import LAYER_STATS, Note, StepMetrics


def write_lines(path: Path, *contents: object) -> None:
    path.write_text("".join(json.dumps(content) + "\n" for content in contents))


def write_run(run_dir: Path) -> None:
    journal = Journal(run_dir, info={"seed": 3}, on_failure=pytest.fail)
    journal.layout(["a", "b"], [10, 20])
    stats = np.arange(16, dtype=np.float32).reshape(2, 8)
    journal.row(StepMetrics(step=0, attempt=0, time=1.0, loss=2.5), stats)
    stats[1] = [0, 0, 0, 0, 0, -1, 0, 0]  # "b" had no gradient
    journal.row(StepMetrics(step=1, attempt=1, time=2.0, loss=1.5), stats)
    journal.layout(["b", "c"], [20, 30])
    journal.row(StepMetrics(step=2, attempt=2, time=3.0), stats + 100)
    journal.row(StepMetrics(step=3, attempt=3, time=4.0), None)
    journal.event(Note(step=3, attempt=3, name="end", values={"best": math.nan}))
    journal.close()


def test_read_returns_scalars_info_and_events(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = surefoot.read(tmp_path)
    assert run.scalars["loss"][:2].tolist() == [2.5, 1.5]
    assert np.isnan(run.scalars["loss"][2:]).all()
    assert run.scalars["step"].tolist() == [0, 1, 2, 3]
    assert len(run.scalars) == len(list(run.scalars)) == len(run.scalars.keys())
    assert "attempt" in run.scalars
    assert "nonsense" not in run.scalars
    with pytest.raises(KeyError, match="there are step, attempt"):
        run.scalars["nonsense"]
    with pytest.raises(ValueError, match="read-only"):
        run.scalars["loss"][0] = 1
    assert run.info["seed"] == 3
    assert math.isnan(run.events[0]["values"]["best"])
    assert repr(run) == (f"Run({str(tmp_path)!r}, 4 rows, last step 3, 1 events, 3 tensors in 3 rows)")


def test_layers_by_name_across_a_change_of_tensors(tmp_path: Path) -> None:
    write_run(tmp_path)
    layers = read(tmp_path).layers
    assert list(layers) == ["a", "b", "c"]
    assert layers.numels == {"a": 10, "b": 20, "c": 30}
    assert layers.steps.tolist() == layers.attempts.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(layers["a"]["norm"], [0, 0, math.nan])
    np.testing.assert_array_equal(layers["b"]["mean"], [9, math.nan, 101])
    np.testing.assert_array_equal(layers["c"]["sub"], [math.nan, math.nan, 100])
    np.testing.assert_array_equal(layers.grid("norm"), np.stack([layers[name]["norm"] for name in layers], axis=1))
    assert tuple(layers["a"]) == LAYER_STATS
    for lookup in (lambda: layers["d"], lambda: layers["a"]["median"], lambda: layers.grid("median")):
        with pytest.raises(KeyError, match="there are"):
            lookup()
    assert "3 tensors, 3 rows" in repr(layers)
    assert "'a', 3 rows" in repr(layers["a"])


def test_reading_writes_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)

    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [tmp_path, *tmp_path.rglob("*")]}

    before = state()
    run = read(tmp_path)
    assert run.scalars["loss"].size == 4
    assert run.layers.grid("norm").size == 9
    assert state() == before


def test_events_of_all_ranks_are_ordered_by_attempt(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "events.jsonl",
        {"kind": "note", "step": 1, "attempt": 1, "rank": 0, "time": 50.0, "id": "a"},
        {"kind": "unknown", "step": 5, "attempt": 6, "rank": 0, "time": 51.0, "id": "d", "future": [1]},
        {"kind": "note", "step": 5, "attempt": 5, "rank": 0, "time": 40.0, "id": "e"},
    )
    write_lines(
        tmp_path / "events-rank2.jsonl",
        {"kind": "finding", "step": 1, "attempt": 1, "time": 60.0, "id": "b"},
        {"kind": "finding", "step": 2, "attempt": 2, "time": 10.0, "id": "c"},
        {"kind": "finding", "step": 9, "attempt": "nonsense", "time": None, "id": "c2"},
        {"id": "c3"},
    )
    run = read(tmp_path)
    assert [event["id"] for event in run.events] == ["a", "b", "c", "c2", "c3", "d", "e"]
    assert run.events[5]["kind"] == "unknown"
    assert run.events[5]["future"] == [1]
    assert run.events[1]["rank"] == 2
    assert run.events[4] == {"kind": "note", "step": -1, "attempt": -1, "rank": 2, "time": 0.0, "id": "c3"}


def test_lines_that_cannot_be_parsed_are_counted(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"id":1}\n\n{"id"\n\xff\xfe\n[1]\n{"id":2,"x":NaN}\n{"id":3}')
    run = read(tmp_path)
    assert [event["id"] for event in run.events] == [1, 2, 3]
    assert run.skipped == 3
    assert "3 lines skipped" in repr(run)
    assert "run.json is missing" in run.notes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_anywhere_never_stops_the_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    run_dir = tmp_path_factory.getbasetemp() / "damaged"
    if not run_dir.exists():
        write_run(run_dir)
        for path in [path for path in run_dir.rglob("*") if path.is_file()]:
            path.with_name(path.name + ".good").write_bytes(path.read_bytes())
    good = data.draw(st.sampled_from(sorted(run_dir.rglob("*.good"))))
    damaged, content = good.with_name(good.name.removesuffix(".good")), good.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    damaged.write_bytes(content[:start] + data.draw(st.binary(max_size=20)) + content[end:])
    try:
        run = read(run_dir)
        assert all(len(column) == run.scalars.rows for column in run.scalars.values())
        assert all(
            stat in run.layers.stats and run.layers.grid(stat).shape[0] == run.layers.rows
            for stat in LAYER_STATS[:1]
            if run.layers.rows
        )
        assert repr(run)
    finally:
        damaged.write_bytes(content)


def test_a_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, error in (
        (tmp_path / "file", "a file"),
        (tmp_path / "no", "does not exist"),
        (tmp_path, "no run.json"),
    ):
        with pytest.raises(ValueError, match=error):
            read(path)


def test_missing_and_future_files_are_noted(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": 99}')
    run = read(tmp_path)
    assert any("newer surefoot" in note for note in run.notes)
    assert run.scalars.rows == 0
    assert list(run.scalars) == []
    assert run.layers.rows == 0
    assert run.events == []
    (tmp_path / "run.json").write_text("{")
    assert read(tmp_path).notes == ["run.json is unreadable"]
    assert repr(read(tmp_path)).endswith("0 rows, 0 events, run.json is unreadable)")


@pytest.mark.parametrize("seen", [0, 1, 40], ids=["empty", "one byte", "half a header"])
def test_a_file_written_during_the_read_is_not_reported_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: int
) -> None:
    write_run(tmp_path)
    newest = sorted((tmp_path / "signals").glob("layers-*.bin"))[-1]
    content = newest.read_bytes()
    newest.write_bytes(content[:seen])

    def fill_after_mapping(path: Path) -> tuple[RowHeader, np.ndarray]:
        try:
            return map_rows(path)
        finally:
            if path == newest:
                newest.write_bytes(content)

    monkeypatch.setattr(reader, "map_rows", fill_after_mapping)
    run = read(tmp_path)
    assert run.notes == []
    assert run.layers.attempts.tolist() == ([0, 1, 2] if seen else [0, 1])

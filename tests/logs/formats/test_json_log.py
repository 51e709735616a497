"""JSON logs of many structures: losses, steps and columns are found."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.logs.formats import detect, json_log
from surefoot.logs.formats.json_records import RecordBlock
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable, TableBuilder


def read(tmp_path: Path, content: str | bytes, name: str = "log") -> LogTable:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    (table,) = detect.read_log(file)
    return table


def values(table: LogTable, name: str) -> list[float]:
    return table.columns[name].values.tolist()


def steps(table: LogTable, name: str, by: str = "step") -> list[float]:
    """The steps of a column's values, joined by record."""
    axis = dict(zip(table.columns[by].rows.tolist(), table.columns[by].values.tolist(), strict=True))
    return [axis[row] for row in table.columns[name].rows.tolist()]


STATE: dict[str, Any] = {
    "best_metric": 0.5,
    "global_step": 30,
    "max_steps": 30,
    "num_train_epochs": 3,
    "log_history": [
        {"epoch": 1.0, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": 2.0, "step": 10},
        {"epoch": 1.0, "eval_loss": 2.1, "eval_runtime": 3.0, "step": 10},
        {"epoch": 2.0, "grad_norm": math.nan, "learning_rate": 5e-5, "loss": 1.5, "step": 20},
        {"epoch": 3.0, "grad_norm": math.inf, "learning_rate": 0.0, "loss": 1.2, "step": 30},
        {"epoch": 3.0, "step": 30, "total_flos": 1e15, "train_loss": 1.57, "train_runtime": 99.0},
    ],
}


def test_trainer_state_gives_its_points_without_the_summary(tmp_path: Path) -> None:
    table = read(tmp_path, json.dumps(STATE, indent=2))
    assert table.format == "trainer_state"
    assert values(table, "loss") == [2.0, 1.5, 1.2]
    assert steps(table, "loss") == [10, 20, 30]
    assert steps(table, "eval_loss") == [10]
    assert math.isnan(values(table, "grad_norm")[1])
    assert values(table, "grad_norm")[2] == math.inf
    assert "train_loss" not in table.columns
    assert table.settings["train_loss"] == 1.57
    assert table.settings["max_steps"] == 30
    assert table.settings["num_train_epochs"] == 3


def test_truncated_trainer_state_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    text = json.dumps(STATE, indent=2)
    table = read(tmp_path, text[: text.index("5e-05")])
    assert values(table, "loss") == [2.0]
    assert values(table, "eval_loss") == [2.1]
    assert table.skipped == {"documents cut off in the middle": 1}


def test_invalid_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = [
        "starting up",
        '{"step": 1, "loss": 2.5, "ok": true, "note": "hello", "sizes": [1, 2]}',
        '{"step": 2, "loss": NaN}',
        "",
        '{"step": "3", "loss": "1e-4"}',
        '{"step": 4, "loss": -Infinity, "norm": nan}',
        '{"step": 5, "loss": {"total": 1.0, "parts": {"a": 0.5}}}',
        '{"step": 6, "lo',
    ]
    table = read(tmp_path, "\r\n".join(lines))
    assert values(table, "step") == [1, 2, 3, 4, 5]
    assert np.array_equal(values(table, "loss"), [2.5, math.nan, 1e-4, -math.inf], equal_nan=True)
    assert values(table, "loss/total") == [1.0]
    assert steps(table, "loss/parts/a") == [5]
    assert "ok" not in table.columns
    assert "sizes" not in table.columns
    assert table.skipped == {"lines that are not JSON": 1, "lines cut off in the middle": 1}


@pytest.mark.parametrize("field", ["split", "phase", "mode", "type", "stage"])
def test_training_and_evaluation_rows_are_separate_columns(tmp_path: Path, field: str) -> None:
    lines = [
        json.dumps({field: "config", "lr": 0.5, "batch": 8}),
        json.dumps({field: "train", "step": 1, "loss": 2.0, "lr": 0.1}),
        json.dumps({field: "val", "step": 1, "loss": 9.0, "val_acc": 0.5}),
        json.dumps({field: "train", "step": 2, "loss": 1.0, "lr": 0.1}),
    ]
    table = read(tmp_path, "\n".join(lines) + "\n")
    assert values(table, "train/loss") == [2.0, 1.0]
    assert values(table, "val/loss") == [9.0]
    assert values(table, "val_acc") == [0.5]
    assert values(table, "step") == [1, 1, 2]
    assert table.settings["lr"] == 0.5


def test_long_format_with_name_and_value_fields(tmp_path: Path) -> None:
    lines = [{"key": key, "value": 1.0 / (step + 1), "step": step} for step in range(3) for key in ("loss", "lr")]
    table = read(tmp_path, "\n".join(map(json.dumps, lines)) + "\n")
    assert values(table, "loss") == [1.0, 0.5, 1 / 3]
    assert steps(table, "lr") == [0, 1, 2]


@pytest.mark.parametrize(
    ("document", "name", "expected"),
    [
        ({"loss": [3, 2, 1], "val_loss": [4, 3, 2]}, "val_loss", [4, 3, 2]),
        ({"history": {"loss": [3, 2, 1]}, "params": {"epochs": 3}}, "loss", [3, 2, 1]),
        ({"train": {"loss": [3, 2, 1]}, "val": {"loss": [4, 3, 2]}}, "val/loss", [4, 3, 2]),
        ({"epochs": [{"epoch": 0, "loss": 3}, {"epoch": 1, "loss": 2}]}, "loss", [3, 2]),
        ({"train": [{"step": 1, "loss": 3}], "val": [{"step": 1, "loss": 4}]}, "val/loss", [4]),
        ({"0": {"loss": 3}, "1": {"loss": 2}}, "loss", [3, 2]),
        ({"epoch_1": {"train": {"loss": 3}}, "epoch_2": {"train": {"loss": 2}}}, "train/loss", [3, 2]),
        ({"loss": {"0": 3, "1": 2, "2": 1}}, "loss", [3, 2, 1]),
        ({"loss": [[10, 3], [20, 2], [30, 1]]}, "loss", [3, 2, 1]),
        ([[1.7e9, 10, 3.0], [1.7e9, 20, 2.0]], "value", [3, 2]),
        ([{"step": 1, "loss": 3}, {"step": 2, "loss": None}, {"step": 3, "loss": 1}], "loss", [3, 1]),
        ({"columns": ["step", "loss"], "index": [0, 1], "data": [[1, 3], [2, 2]]}, "loss", [3, 2]),
        ([["step", "loss"], [1, 3], [2, 2]], "loss", [3, 2]),
        ([3.0, 2.0, 1.0], "value", [3, 2, 1]),
        ({"loss": [3.0, 2.0], "lr": [0.1, "0.2"], "name": "x"}, "lr", [0.1, 0.2]),
        ({"metrics": [{"key": "loss", "value": 3, "step": 0, "timestamp": 5}]}, "loss", [3]),
        ({"loss": 0.5, "accuracy": 0.9}, "loss", [0.5]),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_documents_of_many_shapes(
    tmp_path: Path, document: Any, name: str, expected: list[float], indent: int | None
) -> None:
    assert values(read(tmp_path, json.dumps(document, indent=indent)), name) == expected


def test_step_value_pairs_and_epoch_keys(tmp_path: Path) -> None:
    assert steps(read(tmp_path, '{"loss": [[10, 3], [20, 2], [30, 1]]}'), "loss") == [10, 20, 30]
    assert steps(read(tmp_path, '{"1": {"loss": 3}, "2": {"loss": 2}}'), "loss", "epoch") == [1, 2]
    assert steps(read(tmp_path, '{"step_100": {"loss": 3}, "step_200": {"loss": 2}}'), "loss") == [100, 200]


def test_shorter_list_is_spread_over_the_longer_one(tmp_path: Path) -> None:
    table = read(tmp_path, json.dumps({"train_loss": [1.0] * 100, "val_loss": [2.0] * 4}))
    assert table.columns["val_loss"].rows.tolist() == [24, 49, 74, 99]


def test_lists_with_their_own_steps_keep_them(tmp_path: Path) -> None:
    table = read(tmp_path, '{"eval": {"step": [3], "loss": [1.5]}, "step": [1, 2, 3], "loss": [3, 2, 1]}')
    assert steps(table, "loss") == [1, 2, 3]
    assert steps(table, "eval/loss") == [3]


def test_first_line_with_settings_is_skipped(tmp_path: Path) -> None:
    first = json.dumps({"config": "x" * 200_000})
    table = read(tmp_path, first + "\n" + '{"step": 1, "loss": 2.0}\n' * 3)
    assert values(table, "loss") == [2.0] * 3


def test_consecutive_pretty_printed_objects(tmp_path: Path) -> None:
    text = "\n".join(json.dumps({"step": step, "loss": 1.0 / step}, indent=2) for step in (1, 2, 4))
    assert values(read(tmp_path, text), "loss") == [1.0, 0.5, 0.25]


def test_nan_for_an_evaluation_not_made_is_a_missing_value(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": 1.0, "val_loss": 2.0 if n % 10 == 0 else math.nan} for n in range(100)]
    table = read(tmp_path, "\n".join(map(json.dumps, lines)) + "\n")
    assert values(table, "val_loss") == [2.0] * 10
    assert any("not measured" in note for note in table.notes)


def test_loss_null_to_the_end_is_nan(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": 1.0 if n < 60 else None, "elo": None} for n in range(100)]
    table = read(tmp_path, "\n".join(map(json.dumps, lines)) + "\n")
    assert len(table.columns["loss"]) == 100
    assert np.isnan(table.columns["loss"].values[60:]).all()
    assert "elo" not in table.columns


@pytest.mark.parametrize("content", ["{}", "[]", '{"name": "x"}', '[["a", "b"]]', '{"a":' * 5000])
def test_json_without_numbers_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(UnreadableInput, match="contains no"):
        read(tmp_path, content)


def test_numbers_of_any_size(tmp_path: Path) -> None:
    table = read(tmp_path, '{"step": 1, "loss": 1' + "0" * 400 + '}\n{"step": 2, "loss": 1e999}\n{"step":3,"loss":5}\n')
    assert values(table, "loss") == [math.inf, math.inf, 5]


numbers = st.one_of(
    st.integers(-(10**20), 10**20), st.floats(), st.sampled_from(["0.5", "nan", "x", ""]), st.none(), st.booleans()
)
records = st.lists(
    st.dictionaries(
        st.sampled_from(["step", "loss", "split", "a b", "type"]),
        st.one_of(numbers, st.dictionaries(st.sampled_from(["x", "y"]), numbers), st.sampled_from(["train", "val"])),
    ),
    max_size=12,
)


@given(records)
@settings(max_examples=100, deadline=None)
def test_fast_and_line_by_line_readers_agree(rows: list[dict[str, Any]]) -> None:
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    quick, careful = TableBuilder(), TableBuilder()
    at_once = json_log.parse_lines_together(raw)
    assert at_once is not None or not rows
    RecordBlock(quick).add(at_once or [])
    one_by_one = RecordBlock(careful)
    for line in raw.splitlines(keepends=True):
        one_by_one.add(json_log.parse_lines_singly(line, careful))
    same(quick.build("a", ""), careful.build("a", ""))


regular = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.tuples(*[st.one_of(st.floats(), st.integers(-(10**25), 10**25))] * width), min_size=1, max_size=8
    )
)


@given(regular, st.sampled_from([(", ", ": "), (",", ":")]), st.sampled_from(["\n", "\r\n"]), st.data())
@settings(max_examples=80, deadline=None)
def test_readers_agree_on_lines_of_numbers(
    rows: list[tuple[float, ...]], separators: tuple[str, str], end: str, data: st.DataObject
) -> None:
    names = ["step", "loss", "val, loss", 'a"b'][: len(rows[0])]
    lines = [json.dumps(dict(zip(names, row, strict=True)), separators=separators) + end for row in rows]
    if data.draw(st.booleans()):  # a line unlike the others
        odd = data.draw(st.sampled_from(['{"loss": 1, "step": 2}', '{"step": null}', '{"step": "5"}', "{}", "[1]", ""]))
        lines.insert(data.draw(st.integers(0, len(lines))), odd + end)
    raw = "".join(lines).encode()
    matrix = json_log.parse_number_matrix(raw)
    assert matrix is not None or len(lines) > len(rows)
    if matrix is not None:
        quick, careful = TableBuilder(), TableBuilder()
        quick.extend(dict(zip(matrix[0], matrix[1].T, strict=True)), {})
        RecordBlock(careful).add(json_log.parse_lines_singly(raw, careful))
        same(quick.build("a", ""), careful.build("a", ""))


def same(first: LogTable, second: LogTable) -> None:
    assert first.records == second.records
    assert set(first.columns) == set(second.columns)
    for name, column in first.columns.items():
        assert np.array_equal(column.rows, second.columns[name].rows)
        assert np.array_equal(column.values, second.columns[name].values, equal_nan=True)


FIXTURES = [
    json.dumps(STATE).encode(),
    json.dumps(STATE, indent=1).encode(),
    b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n' * 20,
    json.dumps({"train": {"loss": [1, 2]}, "val": {"loss": [[1, 2], [3, 4]]}}).encode(),
]


@given(st.sampled_from(FIXTURES), st.sampled_from(FIXTURES), st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cut_and_spliced_files_never_crash(tmp_path: Path, first: bytes, second: bytes, data: st.DataObject) -> None:
    cut, start = data.draw(st.integers(0, len(first))), data.draw(st.integers(0, len(second)))
    middle = data.draw(st.binary(max_size=20))
    with suppress(UnreadableInput):
        read(tmp_path, first[:cut] + middle + second[start:])

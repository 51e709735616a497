"""CSV files with the irregularities of real ones."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.logs.formats import csv_log, detect
from surefoot.logs.formats.parse_number import parse_number
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable


def read(tmp_path: Path, content: str | bytes, name: str = "log") -> LogTable:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    (table,) = detect.read_log(file)
    assert table.format in ("csv", "tsv")
    return table


def values(table: LogTable, name: str) -> list[float]:
    return table.columns[name].values.tolist()


PLAIN = "step,loss,lr\n1,2.5,1e-4\n2,nan,2e-4\n3,inf,3e-4\n"


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (PLAIN, "csv"),
        (PLAIN.replace("\n", "\r\n"), "csv"),
        (PLAIN.replace(",", "\t"), "tsv"),
        (PLAIN.replace(",", ";"), "csv"),
        (PLAIN.replace(",", "|"), "csv"),
        (PLAIN.replace(",", "    "), "csv"),
        (PLAIN.replace(",", "   ,   "), "csv"),
        ("# made by hand\n" + PLAIN, "csv"),
        ("step,loss,lr\n\n" + PLAIN.split("\n", 1)[1], "csv"),
        ("# step loss lr\n" + PLAIN.split("\n", 1)[1].replace(",", " "), "csv"),
        ('"step","loss","lr"\n"1","2.5","1e-4"\n"2","NaN","2e-4"\n"3","Infinity","3e-4"\n', "csv"),
        ("| step | loss | lr |\n|---|---|---|\n| 1 | 2.5 | 1e-4 |\n| 2 | nan | 2e-4 |\n| 3 | inf | 3e-4 |\n", "csv"),
        ("step;loss;lr\n1;2,5;0,0001\n2;nan;0,0002\n3;inf;0,0003\n", "csv"),
        (",step,loss,lr\n0,1,2.5,1e-4\n1,2,nan,2e-4\n2,3,inf,3e-4\n", "csv"),
        ("step,loss,lr,name\n1,tensor(2.5),1e-4,a\n2,-nan(ind),2e-4,b\n3,1.#INF,3e-4,c\n", "csv"),
    ],
)
def test_dialects_of_one_table(tmp_path: Path, content: str, format: str) -> None:
    table = read(tmp_path, content)
    assert table.format == format
    assert values(table, "step") == [1, 2, 3]
    assert np.array_equal(values(table, "loss"), [2.5, math.nan, math.inf], equal_nan=True)
    assert values(table, "lr") == [1e-4, 2e-4, 3e-4]
    assert table.records == 3


def test_sparse_column_keeps_its_records(tmp_path: Path) -> None:
    table = read(tmp_path, "step,train_loss,val_loss\n1,2.0,\n1,,3.0\n2,1.0,\n2,None,N/A\n")
    assert values(table, "train_loss") == [2.0, 1.0]
    assert table.columns["val_loss"].rows.tolist() == [1]
    assert table.records == 4


def test_numbers_without_a_header_get_plain_names(tmp_path: Path) -> None:
    assert list(read(tmp_path, "1,2.5\n2,2.4\n3,2.3\n").columns) == ["col1", "col2"]
    assert values(read(tmp_path, "2.5\n2.4\n2.3\n"), "col1") == [2.5, 2.4, 2.3]
    assert values(read(tmp_path, "loss\n2.5\n2.4\n2.3\n"), "loss") == [2.5, 2.4, 2.3]


def test_appended_run_is_read(tmp_path: Path) -> None:
    table = read(tmp_path, "epoch,loss\n0,2.0\n1,1.0\nepoch,loss\n0,2.5\nepoch,loss,lr\n1,1.5,0.1\n")
    assert values(table, "loss") == [2.0, 1.0, 2.5, 1.5]
    assert values(table, "lr") == [0.1]
    assert table.notes == ("the file contains the header 3 times: runs were appended to it",)


def test_rows_of_the_wrong_length_are_used_and_counted(tmp_path: Path) -> None:
    good = "".join(f"{n},1.0,0.1\n" for n in range(4, 14))
    table = read(tmp_path, f"step,loss,lr\n1,2.0,0.1\n2,1.5\n3,1.2,0.1,9,9\nkilled\n{good}14,0.9\n15,0.")
    assert values(table, "step") == list(range(1, 16))
    assert values(table, "loss") == [2.0, 1.5, 1.2, *[1.0] * 10, 0.9]
    assert table.skipped == {
        "rows shorter than the header": 2,
        "rows longer than the header": 1,
        "rows without a number": 1,
        "lines cut off in the middle": 1,
    }


def test_chart_export_drops_min_max_columns_and_run_names(tmp_path: Path) -> None:
    header = '"Step","proud-sun-7 - train/loss","proud-sun-7 - train/loss__MIN","proud-sun-7 - train/loss__MAX"\n'
    table = read(tmp_path, header + '"0","2.5","2.5","2.5"\n"10","2.0","2.0","2.0"\n')
    assert list(table.columns) == ["Step", "train/loss"]
    assert table.settings["run"] == "proud-sun-7"


def test_export_of_two_runs_gives_two_tables(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text('"Step","a - loss","a - loss__MIN","b - loss"\n0,1,1,5\n1,2,2,6\n2,3,3,\n')
    first, second = detect.read_log(file)
    assert values(first, "loss") == [1, 2, 3]
    assert values(second, "loss") == [5, 6]
    assert (first.settings["run"], second.settings["run"]) == ("a", "b")


def test_rows_labelled_by_split_become_separate_columns(tmp_path: Path) -> None:
    table = read(tmp_path, "epoch,phase,loss\n0,train,2.0\n0,val,3.0\n1,train,1.0\n1,val,2.5\n")
    assert values(table, "train/loss") == [2.0, 1.0]
    assert values(table, "val/loss") == [3.0, 2.5]
    assert values(table, "epoch") == [0, 0, 1, 1]


def test_long_format_with_name_and_value_columns(tmp_path: Path) -> None:
    table = read(tmp_path, "step,metric,value\n1,loss,2.0\n1,lr,0.1\n2,loss,1.0\n2,lr,0.1\n")
    assert values(table, "loss") == [2.0, 1.0]
    assert values(table, "lr") == [0.1, 0.1]


def test_tag_of_an_exported_scalar_comes_from_the_file_name(tmp_path: Path) -> None:
    table = read(tmp_path, "Wall time,Step,Value\n1.7e9,1,2.0\n1.7e9,2,1.0\n", "run-a-tag-train_loss.csv")
    assert values(table, "train_loss") == [2.0, 1.0]


def test_mlflow_metric_file(tmp_path: Path) -> None:
    table = read(
        tmp_path, "".join(f"{1_700_000_000_000 + n} {1.0 / (n + 1)} {n * 10}\n" for n in range(9)), "train_loss"
    )
    assert values(table, "train_loss")[:2] == [1.0, 0.5]
    assert values(table, "step")[:2] == [0, 10]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    text = "step,loss,über\n" + "".join(f"{n},{n / 2},0\n" for n in range(300))
    if encoding in ("utf-16-le", "utf-16-be"):
        text = text.replace("ü", "u")
    table = read(tmp_path, text.encode(encoding))
    assert next(iter(table.columns)) == "step"
    assert len(table.columns["loss"]) == 300


def test_block_of_nul_bytes_is_skipped(tmp_path: Path) -> None:
    rows = b"".join(b"%d,0.5\n" % n for n in range(50))
    table = read(tmp_path, b"step,loss\n" + rows + b"\0" * 4096 + b"\n50,0.5\n51,0.5\n")
    assert len(table.columns["loss"]) == 52


def test_nan_for_evaluations_not_made_is_a_missing_value(tmp_path: Path) -> None:
    rows = "".join(f"{n},1.0,{2.0 if n % 5 == 4 else 'nan'}\n" for n in range(60))
    table = read(tmp_path, "step,loss,val_loss\n" + rows)
    assert values(table, "val_loss") == [2.0] * 12
    assert table.columns["val_loss"].rows.tolist() == list(range(4, 60, 5))


def test_nan_of_a_real_evaluation_is_kept(tmp_path: Path) -> None:
    rows = "".join(f"{n},1.0,{2.0 if n % 5 == 4 and n < 40 else 'nan'}\n" for n in range(60))
    table = read(tmp_path, "step,loss,val_loss\n" + rows)
    assert table.columns["val_loss"].rows.tolist() == list(range(4, 60, 5))
    assert np.isnan(table.columns["val_loss"].values).sum() == 4


def test_two_kinds_of_rows_padded_with_nan(tmp_path: Path) -> None:
    random.seed(3)
    kinds = [random.random() < 0.8 for _ in range(80)]
    rows = "".join(f"{n},{'1.0,nan' if train else 'nan,2.0'}\n" for n, train in enumerate(kinds))
    table = read(tmp_path, "step,loss,val_loss\n" + rows)
    assert values(table, "loss") == [1.0] * sum(kinds)
    assert not np.isnan(table.columns["val_loss"].values).any()


@pytest.mark.parametrize("first", [0, 1, 30, 59])
def test_lasting_nan_loss_is_kept(tmp_path: Path, first: int) -> None:
    rows = "".join(f"{n},{1.0 if n < first else 'nan'},0.5\n" for n in range(60))
    table = read(tmp_path, "step,loss,val_loss\n" + rows)
    assert np.isnan(table.columns["loss"].values).sum() == 60 - first


def test_loss_left_empty_to_the_end_by_pandas_is_nan(tmp_path: Path) -> None:
    rows = "".join(f"{n},{1.0 if n < 40 else ''},{0.5 if n % 2 else ''}\n" for n in range(60))
    table = read(tmp_path, "step,loss,acc\n" + rows)
    assert np.isnan(table.columns["loss"].values).sum() == 20
    assert len(table.columns["acc"]) == 30
    assert any("read as NaN" in note for note in table.notes)


@pytest.mark.parametrize(
    "text",
    [
        "epoch 1 loss 0.5 acc 0.3\nepoch 2 loss 0.4 acc 0.35\nepoch 3 loss 0.3 acc 0.4\n",
        "Epoch 1, loss: 0.5, acc: 0.3\nEpoch 2, loss: 0.4, acc: 0.3\n",
        "2024-01-01 10:00:00,123 INFO step 1 loss 2.0\n2024-01-01 10:00:01,123 INFO step 2 loss 1.9\n",
        "[1/10] loss=0.5\n[2/10] loss=0.4\n",
        "-----------\n| loss | 3 |\n| lr | 4 |\n-----------\n",
        "the quick brown fox\njumps over the lazy dog\n",
        "a,b\nc,d\n",
    ],
)
def test_console_text_is_not_csv(text: str) -> None:
    assert not csv_log.fits(text.encode())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 1e-4 ", 1e-4), ("1.2K", 1200), ("95 %", 95), ("3.5GB", 3.5), ("tensor(0.5, device='cuda:0')", 0.5),
        ("[0.25]", 0.25), ("1,234,567", 1234567), ("∞", math.inf), ("-Infinity", -math.inf), ("12ms", 12),
        ("2024-01-01", None), ("10:30:00", None), ("None", None), ("N/A", None), ("", None), ("run7", None),
        ("12abcdef", None), ("3/300", 3), ("2024/01/01", None), ("nan", math.nan), ("-nan", math.nan), ("'0.5'", 0.5),
    ],
)  # fmt: skip
def test_number_formats(text: str, expected: float | None) -> None:
    number = parse_number(text)
    assert number == expected or (
        number is not None and expected is not None and math.isnan(number) == math.isnan(expected)
    )


cells = st.one_of(
    st.floats().map(str), st.integers(-(10**9), 10**9).map(str), st.sampled_from(["", "nan", "None", " 1 ", "x", '"2"'])
)


@given(st.lists(st.lists(cells, min_size=2, max_size=4), min_size=1, max_size=30), st.sampled_from([",", "\t", ";"]))
@settings(max_examples=80, deadline=None)
def test_fast_and_row_by_row_readers_agree(rows: list[list[str]], sign: str) -> None:
    header = sign.join(["step", "loss", "lr"])
    dialect = csv_log.detect_dialect(
        "\n".join([header, sign.join(["1", "2.0", "3.0"]), sign.join(["2", "2.0", "3.0"]), ""])
    )
    assert dialect is not None
    text = "".join(sign.join(row) + "\n" for row in rows)
    vectorized_reader, row_reader = csv_log.CsvReader(dialect, ""), csv_log.CsvReader(dialect, "")
    vectorized_reader.feed(header + "\n")
    row_reader.feed(header + "\n")
    vectorized_reader.feed(text)
    for line in text.splitlines(keepends=True):
        row_reader.feed_by_row(line)
    vectorized, row_by_row = vectorized_reader.builder.build("csv", ""), row_reader.builder.build("csv", "")
    assert vectorized.records == row_by_row.records
    assert vectorized.skipped == row_by_row.skipped
    assert set(vectorized.columns) == set(row_by_row.columns)
    for name, column in vectorized.columns.items():
        assert np.array_equal(column.rows, row_by_row.columns[name].rows)
        assert np.array_equal(column.values, row_by_row.columns[name].values, equal_nan=True)


FIXTURES = [
    PLAIN.encode() * 10,
    b"step;loss\n1;2,5\n2;2,4\n" * 5,
    b'"a - loss","a - loss__MIN",Step\n"1","2","3"\n"1","2","3"\n',
    b"  epoch,   loss\n      1,    2.0\n      2,    1.0\n" * 4,
]


@given(st.sampled_from(FIXTURES), st.sampled_from(FIXTURES), st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cut_and_spliced_files_never_crash(tmp_path: Path, first: bytes, second: bytes, data: st.DataObject) -> None:
    cut, start = data.draw(st.integers(0, len(first))), data.draw(st.integers(0, len(second)))
    middle = data.draw(st.binary(max_size=20))
    file = tmp_path / "log"
    file.write_bytes(first[:cut] + middle + second[start:])
    with suppress(UnreadableInput):
        detect.read_log(file)

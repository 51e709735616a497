"""W&B run files, intact and damaged, written by these tests."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from eventfiles import field
from hypothesis import given, settings
from hypothesis import strategies as st
from wandbfiles import (
    BLOCK,
    CONFIG,
    RUN,
    STATS,
    SUMMARY,
    ended,
    file,
    history,
    item,
    printed,
    steps,
)

from surefoot.logs.formats import wandb_log
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable


def read(data: bytes) -> LogTable:
    return wandb_log.read(LogSource(io.BytesIO(data), "run-1.wandb"))


def losses(table: LogTable, name: str = "train/loss") -> list[float]:
    return table.columns[name].values.tolist()


def test_logged_values_are_read_with_their_steps() -> None:
    table = read(file(*steps(100), ended(0)))
    assert table.format == "wandb"
    assert losses(table) == [5 - n / 100 for n in range(100)]
    assert table.columns["_step"].values.tolist() == list(range(100))
    assert table.settings["exit_code"] == 0
    assert not table.skipped
    assert not table.notes


def test_records_longer_than_a_block_are_joined() -> None:
    big = history({"_step": 1, "loss": 2.0, "words": "x" * 100_000})
    table = read(file(*steps(2000), big, ended(0)))
    assert losses(table, "loss") == [2.0]
    assert len(losses(table)) == 2000


def test_step_may_be_beside_the_items() -> None:
    table = read(file(history({"loss": 1.0}, step=7), history({"loss": 0.5}, step=8), ended(0)))
    assert table.columns["_step"].values.tolist() == [7, 8]


def test_nested_names_are_joined_and_nonfinite_numbers_kept() -> None:
    table = read(file(history({("train", "loss"): 1.5, "a": b"NaN", "b": "Infinity", "c": {"d": True}}), ended(0)))
    assert losses(table, "train.loss") == [1.5]
    assert math.isnan(losses(table, "a")[0])
    assert losses(table, "b") == [math.inf]
    assert losses(table, "c.d") == [1.0]


def test_images_and_histograms_are_counted_once_each() -> None:
    nested = {("h", "_type"): "histogram", ("h", "bins"): [1, 2], ("h", "count"): 3}
    whole = {"picture": {"_type": "image-file", "width": 10}}
    table = read(file(history({"loss": 1.0, **nested, **whole}), ended(0)))
    assert set(table.columns) == {"loss"}
    assert list(table.skipped.values()) == [2]


def test_settings_become_facts() -> None:
    config = item("lr", 0.1) + item("name", "x") + item("opt", {"beta": 0.9, "list": [1]}) + item("_wandb", {"t": 1})
    table = read(file(field(RUN, field(4, config)), field(CONFIG, item("fp16", True)), *steps(1), ended(1)))
    assert dict(table.settings) == {"lr": 0.1, "name": "x", "opt.beta": 0.9, "fp16": 1.0, "exit_code": 1.0}


def test_tail_of_the_console_is_kept() -> None:
    pieces = [printed("noise " * 1000) for _ in range(50)]
    table = read(file(*steps(1), *pieces, printed("Traceback"), printed(" (most"), printed(" recent)"), ended(1)))
    assert table.tail.endswith("Traceback (most recent)")
    assert len(table.tail) <= 1 << 16


def test_system_metrics_get_the_step_of_their_time() -> None:
    stats = field(STATS, b"\x1a" + item("gpu.0.memoryAllocated", 55.0)[1:] + b"\x1a" + item("cpu", 3.0)[1:])
    table = read(file(*steps(3), stats, ended(0)))
    assert losses(table, "system.gpu.0.memoryAllocated") == [55.0]
    assert table.columns["_step"].values.tolist() == [0, 1, 2, 2]
    assert "system.cpu" not in table.columns


def test_missing_exit_record_of_a_killed_run_is_noted() -> None:
    table = read(file(*steps(5)))
    assert "no exit record" in table.notes[0]


def test_run_with_only_a_summary_gives_one_record() -> None:
    table = read(file(field(SUMMARY, item("loss", 0.25)), ended(0)))
    assert losses(table, "loss") == [0.25]


def test_truncated_end_is_skipped_and_noted() -> None:
    table = read(file(*steps(50))[:-5])
    assert len(losses(table)) == 49
    assert table.skipped == {"records cut off at the end of the file": 1}


def test_reading_continues_with_the_block_after_damage() -> None:
    data = bytearray(file(*steps(3000)))
    data[BLOCK + 5000] ^= 1
    table = read(bytes(data))
    assert losses(table)[-1] == 5 - 2999 / 100
    assert 2000 < len(losses(table)) < 3000
    assert table.skipped["damaged places in the file"] == 1


def test_empty_run_file_names_the_files_beside_it() -> None:
    with pytest.raises(UnreadableInput, match=r"output\.log"):
        read(b":W&B\xe1\xbe\0")


def test_run_folder_lists_its_files(tmp_path: Path) -> None:
    files = tmp_path / "offline-run-1" / "files"
    files.mkdir(parents=True)
    (files / "output.log").write_text("step 1 loss 2\n")
    (files / "config.yaml").write_text(
        "_wandb:\n    value: 3\nlr:\n    desc: null\n    value: 0.001\nfp16:\n  value: true\n"
    )
    (files / "wandb-summary.json").write_text('{"loss": NaN, "_step": 10, "name": "x"}')
    run_folder = wandb_log.open_run_folder(files.parent)
    assert run_folder is not None
    assert run_folder.record is None
    assert run_folder.console == files / "output.log"
    assert run_folder.settings["lr"] == 0.001
    assert run_folder.settings["fp16"] == 1.0
    assert math.isnan(float(run_folder.settings["summary.loss"]))
    assert "_wandb" not in run_folder.settings
    (files.parent / "run-1.wandb").write_bytes(file(*steps(3)))
    run_folder = wandb_log.open_run_folder(files.parent)
    assert run_folder is not None
    assert run_folder.record == files.parent / "run-1.wandb"
    assert wandb_log.open_run_folder(tmp_path) is None


_SAMPLE = file(*steps(30), history({"_step": 1, "words": "x" * 40_000}), printed("hello"), *steps(30), ended(1))


@given(
    cuts=st.lists(st.tuples(st.integers(7, len(_SAMPLE)), st.integers(7, len(_SAMPLE))), max_size=4),
    noise=st.binary(max_size=60),
)
@settings(deadline=None, max_examples=80)
def test_cut_and_spliced_files_never_crash(cuts: list[tuple[int, int]], noise: bytes) -> None:
    data = _SAMPLE
    for first, last in cuts:
        data = data[:first] + noise + data[last:]
    try:
        read(data)
    except UnreadableInput:
        return


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(1, 30))
@settings(deadline=None, max_examples=80)
def test_any_bytes_in_a_valid_frame_never_crash(records: list[bytes], kind: int) -> None:
    table = read(file(*records, *(field(kind, data) for data in records), *steps(2)))
    assert len(losses(table)) >= 2

"""TensorBoard files of all writers, intact and damaged, single and in folders."""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path

import pytest
from eventfiles import event, field, opening, record, simple, tensor, varint
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.logs.formats import tensorboard_log
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable


def read(data: bytes) -> LogTable:
    return tensorboard_log.read(LogSource(io.BytesIO(data), "events.out.tfevents.1"))


def plain(count: int = 300, wall: float = 1.7e9) -> bytes:
    events = [event(step, simple("train/loss", 5.0 - step / 100), wall=wall + step) for step in range(count)]
    return opening(wall) + b"".join(events)


def losses(table: LogTable, name: str = "train/loss") -> list[float]:
    return table.columns[name].values.tolist()


def write(folder: Path, data: bytes, name: str = "events.out.tfevents.1.host") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def test_scalars_of_pytorch_are_read_with_step_and_time() -> None:
    table = read(plain())
    assert table.format == "tensorboard"
    assert losses(table) == pytest.approx([5.0 - step / 100 for step in range(300)], rel=1e-6)
    assert table.columns["step"].values.tolist() == list(range(300))
    assert table.columns["wall_time"].values[-1] == 1.7e9 + 299
    assert not table.skipped
    assert not table.notes


@pytest.mark.parametrize(
    ("dtype", "content"),
    [
        (1, field(5, struct.pack("<f", 2.5))),
        (1, field(4, struct.pack("<f", 2.5))),
        (1, b"\x2d" + struct.pack("<f", 2.5)),
        (2, field(6, struct.pack("<d", 2.5))),
        (2, field(4, struct.pack("<d", 2.5))),
        (19, field(13, varint(0x4100))),
        (19, field(4, b"\x00\x41")),
        (14, field(13, varint(0x4020))),
        (14, field(4, b"\x20\x40")),
    ],
)
def test_scalars_of_tensorflow_2_are_read_in_every_number_format(dtype: int, content: bytes) -> None:
    data = opening() + b"".join(event(step, tensor("epoch_loss", dtype, content)) for step in range(3))
    assert losses(read(data), "epoch_loss") == [2.5] * 3


def test_integers_keep_their_sign() -> None:
    data = opening() + event(1, tensor("n", 9, field(10, varint(-3)))) + event(2, tensor("n", 3, b"\x38" + varint(7)))
    assert losses(read(data), "n") == [-3.0, 7.0]


def test_nan_and_infinity_are_kept() -> None:
    table = read(opening() + event(0, simple("loss", math.nan)) + event(1, simple("loss", math.inf)))
    assert math.isnan(losses(table, "loss")[0])
    assert losses(table, "loss")[1] == math.inf


def test_several_values_of_one_event_are_one_record() -> None:
    table = read(opening() + event(7, simple("loss", 1.0), simple("lr", 0.5)) + event(8, simple("loss", 0.5)))
    assert table.records == 2
    assert losses(table, "loss") == [1.0, 0.5]
    assert losses(table, "lr") == [0.5]
    assert table.columns["step"].values.tolist() == [7, 8]


def test_images_and_texts_are_counted_and_skipped() -> None:
    image = field(1, b"picture") + field(4, b"\x08\x01")
    wide = field(1, b"matrix") + field(8, b"\x08\x01" + field(2, field(2, b"\x08\x03")) + field(4, b"\0" * 12))
    table = read(opening() + event(1, image) + event(1, wide) + event(2, simple("loss", 1.0)))
    assert set(table.columns) == {"step", "wall_time", "loss"}
    assert sum(table.skipped.values()) == 2


def test_large_image_is_skipped_without_loading_it() -> None:
    image = event(1, field(1, b"film") + field(4, b"\1" * (5 << 20)))
    table = read(opening() + event(1, simple("loss", 2.0)) + image + event(2, simple("loss", 1.0)))
    assert losses(table, "loss") == [2.0, 1.0]
    assert sum(table.skipped.values()) == 1


def test_settings_of_the_hugging_face_trainer_become_facts() -> None:
    words = field(8, b'{"learning_rate": 0.01, "fp16": true, "output_dir": "out", "nothing": null}')
    table = read(opening() + event(0, tensor("args/text_summary", 7, words, "text")) + event(1, simple("loss", 1.0)))
    assert dict(table.settings) == {"learning_rate": 0.01, "fp16": 1.0, "output_dir": "out"}


def test_steps_that_go_back_are_kept() -> None:
    table = read(opening() + b"".join(event(step, simple("loss", 1.0)) for step in (1, 2, 3, 1, 2)))
    assert table.columns["step"].values.tolist() == [1, 2, 3, 1, 2]


def test_bit_flip_costs_one_record() -> None:
    data = bytearray(plain(50))
    data[len(opening()) + 10 * len(event(1, simple("train/loss", 1.0))) + 20] ^= 4
    table = read(bytes(data))
    assert len(losses(table)) == 49
    assert table.skipped == {"records with a wrong checksum": 1}


def test_reading_continues_after_a_damaged_length() -> None:
    whole = plain(50)
    at = len(whole) // 2
    table = read(whole[:at] + b"\xff" * 37 + whole[at + 37 :])
    assert 45 <= len(losses(table)) < 50
    assert table.skipped["damaged places in the file"] == 1


@pytest.mark.parametrize("cut", [1, 10, 20, 40])
def test_truncated_end_is_skipped_and_noted(cut: int) -> None:
    table = read(plain(50)[:-cut])
    assert len(losses(table)) == 49
    assert sum(table.skipped.values()) == 1


def test_trailing_nul_bytes_are_noted() -> None:
    table = read(plain(50) + b"\0" * 5000)
    assert len(losses(table)) == 50
    assert not table.skipped
    assert len(table.notes) == 1


def test_nul_bytes_in_the_middle_are_skipped() -> None:
    table = read(plain(50) + b"\0" * 5000 + b"".join(event(60, simple("train/loss", 9.0)) for _ in range(2)))
    assert losses(table)[-2:] == [9.0, 9.0]


def test_file_without_a_complete_record_is_refused() -> None:
    with pytest.raises(UnreadableInput, match="contains no complete record"):
        read(opening()[:30])


@pytest.mark.parametrize("head", [b"", b"step,loss\n1,2\n", b'{"loss": 1}', b"\0" * 500, b"PK\x03\x04" + b"\0" * 60])
def test_other_files_do_not_fit(head: bytes) -> None:
    assert not tensorboard_log.fits(head)


def test_file_with_a_damaged_start_is_recognised_by_content() -> None:
    assert tensorboard_log.fits(plain(3))
    assert tensorboard_log.fits(plain(3)[5:])


def test_files_of_one_folder_are_one_run_in_order_of_time(tmp_path: Path) -> None:
    write(tmp_path, plain(10, wall=2000.0), "events.out.tfevents.9.a")
    write(tmp_path, plain(5, wall=1000.0), "events.out.tfevents.9.b")
    (table,) = tensorboard_log.read_folder(tmp_path)
    assert table.columns["step"].values.tolist() == [*range(5), *range(10)]


def test_two_folders_of_keras_are_one_run(tmp_path: Path) -> None:
    for part in ("train", "validation"):
        write(tmp_path / "run" / part, opening() + b"".join(event(n, simple("epoch_loss", n)) for n in range(4)))
    (table,) = tensorboard_log.read_folder(tmp_path)
    assert {"train/epoch_loss", "validation/epoch_loss"} <= set(table.columns)
    assert losses(table, "validation/epoch_loss") == [0, 1, 2, 3]


def test_add_scalars_folders_belong_to_the_parent_run(tmp_path: Path) -> None:
    write(tmp_path, plain(4))
    for part in ("train", "val"):
        write(tmp_path / f"both_loss_{part}", opening() + event(1, simple("both/loss", 3.0)))
    (table,) = tensorboard_log.read_folder(tmp_path)
    assert {"train/loss", "both_loss_train/both/loss", "both_loss_val/both/loss"} <= set(table.columns)


def test_other_folders_are_separate_runs(tmp_path: Path) -> None:
    write(tmp_path / "version_1", plain(4, wall=2000.0))
    write(tmp_path / "version_0", plain(3, wall=1000.0))
    assert [len(losses(table)) for table in tensorboard_log.read_folder(tmp_path)] == [3, 4]


def test_hparams_folder_is_no_run(tmp_path: Path) -> None:
    write(tmp_path, plain(4))
    entry = field(1, b"_hparams_/experiment") + field(9, field(1, field(1, b"hparams")))
    write(tmp_path / "1700000.5", opening() + event(0, entry) + event(0, simple("metric", 1.0)))
    (table,) = tensorboard_log.read_folder(tmp_path)
    assert set(table.columns) == {"step", "wall_time", "train/loss"}


def test_unreadable_file_in_a_folder_is_noted(tmp_path: Path) -> None:
    write(tmp_path, plain(4))
    write(tmp_path, b"junk", "events.out.tfevents.0.junk")
    (table,) = tensorboard_log.read_folder(tmp_path)
    assert "contains no complete record" in table.notes[0]


def test_folder_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match="no TensorBoard event files"):
        tensorboard_log.read_folder(tmp_path)


_SAMPLE = (
    plain(20)
    + event(3, tensor("a", 2, field(4, struct.pack("<d", 2.5))))
    + event(4, simple("b", 1.0), simple("c", 2.0))
    + record(b"\x09\1\2")
)


@given(
    cuts=st.lists(st.tuples(st.integers(0, len(_SAMPLE)), st.integers(0, len(_SAMPLE))), max_size=4),
    noise=st.binary(max_size=60),
)
@settings(deadline=None, max_examples=80)
def test_cut_and_spliced_files_never_crash(cuts: list[tuple[int, int]], noise: bytes) -> None:
    data = _SAMPLE
    for first, last in cuts:
        data = data[:first] + noise + data[last:]
    tensorboard_log.fits(data)
    try:
        table = read(data)
    except UnreadableInput:
        return
    assert table.records <= 400


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=80)
def test_any_bytes_in_a_valid_frame_never_crash(data: bytes) -> None:
    assert len(losses(read(plain(2) + record(data) + event(5, simple("train/loss", 1.0))))) >= 3
